"""Measures of predictions by hand, and the corruptions of test images."""

import math

import pytest
import torch

from examples.research.datasets import corruptions
from examples.research.measures import fit_temperature, quality, spread
from examples.research.tests.test_data import everything, in_memory, seeded_generator


def logits_of(probabilities):
    return torch.tensor(probabilities).log()


def test_quality_by_hand():
    """Two of three right; with 15 bins, 0.9 twice and 0.6 are in two bins: |1 - 0.9| of two, |0 - 0.6| of one."""
    z, y = logits_of([[0.9, 0.1], [0.1, 0.9], [0.6, 0.4]]), torch.tensor([0, 1, 1])
    found = quality(z, y)
    assert found["nll"] == pytest.approx(-(2 * math.log(0.9) + math.log(0.4)) / 3)
    assert found["nll_scaled"] == pytest.approx(found["nll"])
    assert found["ece"] == pytest.approx((2 * 0.1 + 0.6) / 3)


def test_the_scaled_measures_are_those_of_the_divided_logits():
    z, y = torch.randn(50, 4, generator=seeded_generator()), torch.arange(50) % 4
    assert quality(z, y, 2.5)["nll_scaled"] == pytest.approx(quality(z / 2.5, y)["nll"])
    assert quality(z, y, 2.5)["ece"] == quality(z, y)["ece"]
    assert quality(z, y, 2.5)["ece_scaled"] == quality(z / 2.5, y)["ece"] != quality(z, y)["ece"]


def test_the_temperature_by_hand():
    """Logits (d, 0), right in 4 of 5 rows: the softmax is to give 4/5, that is d/T = log 4."""
    labels = torch.tensor([0, 0, 0, 0, 1])
    for size in (0.01, 3.0, 500.0):
        logits = torch.tensor([[size, 0.0]] * 5)
        assert fit_temperature(logits, labels) == pytest.approx(size / math.log(4.0), rel=1e-4)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]])
def test_where_no_temperature_is_best_it_is_one(labels):
    """All right, all wrong, no better than chance."""
    assert fit_temperature(torch.tensor([[2.0, 0.0]] * 4), torch.tensor(labels)) == 1.0


def test_the_spread_by_hand():
    """Class means (2, 0) and (0, 4); their mean over the rows is (4/3, 4/3); no row of the third class."""
    z, y = torch.tensor([[1.0, 0.0, 5.0], [3.0, 0.0, 5.0], [0.0, 4.0, 5.0]]), torch.tensor([0, 0, 1])
    found = spread(z, y)
    assert found["top"] == pytest.approx(((5 - 2) + (5 - 8 / 3) + (5 - 3)) / 3)
    assert found["within"] == pytest.approx(math.sqrt(2 / 9))
    between = 2 * ((2 / 3) ** 2 + (4 / 3) ** 2) + (4 / 3) ** 2 + (8 / 3) ** 2
    assert found["between"] == pytest.approx(math.sqrt(between / 9))


@pytest.mark.parametrize("name", corruptions.NAMES)
def test_a_corruption_changes_images_always_in_the_same_way(name):
    images = torch.randint(256, (6, 1, 18, 18), generator=seeded_generator(), dtype=torch.uint8)
    before, found = images.clone(), corruptions.corrupt(images, name)
    torch.manual_seed(5)
    assert torch.equal(found, corruptions.corrupt(images, name))
    assert torch.equal(images, before)
    assert found.shape == images.shape
    assert found.dtype == torch.uint8
    assert all(not torch.equal(one, other) for one, other in zip(found, images, strict=True))


def test_corruptions_by_hand():
    white = torch.full((4, 1, 9, 9), 255, dtype=torch.uint8)
    assert (corruptions.corrupt(white, "occlusion") == 0).sum((1, 2, 3)).tolist() == [9] * 4
    assert torch.equal(corruptions.corrupt(white, "blur"), white)
    half = torch.tensor([0, 200], dtype=torch.uint8).expand(1, 1, 2, 2)
    assert corruptions.corrupt(half, "contrast").unique().tolist() == [70, 130]  # 100 -+ 0.3 * 100
    dot = torch.zeros(2, 1, 9, 9, dtype=torch.uint8)
    dot[:, :, 4, 7] = 255
    first, second = (found.nonzero()[0, 1:].tolist() for found in corruptions.corrupt(dot, "rotation"))
    assert first == [3, 7]  # 20 degrees are about a pixel at a radius of three
    assert second == [5, 7]
    grey = torch.full((1, 1, 100, 100), 128, dtype=torch.uint8)
    assert float(corruptions.corrupt(grey, "noise").float().std()) == pytest.approx(51, rel=0.02)


def test_corruptions_that_cannot_be():
    with pytest.raises(ValueError, match=r"name='fog' is unknown; choose one of noise, blur"):
        corruptions.corrupt(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), "fog")
    with pytest.raises(ValueError, match=r"images must be uint8, got torch\.float32"):
        corruptions.corrupt(torch.zeros(1, 1, 2, 2), "blur")


def test_a_data_set_gives_its_images_corrupted_and_normalised():
    data = in_memory()
    clean, labels = everything(data, "test")
    (x, y) = next(data.corrupted("test", "occlusion"))
    assert torch.equal(y, labels)
    changed = (x != clean).sum((1, 2, 3))
    assert (changed > 0).all()
    assert (changed <= 36).all()
    assert in_memory(dtype=torch.float32).corruptions == ()


def test_relabelling_is_of_a_share_and_to_other_classes():
    data, noisy = in_memory(count=21), in_memory(count=21)
    noisy.relabel(1 / 3, seeded_generator())
    (images, labels), (same, others) = everything(data, "train"), everything(noisy, "train")
    assert torch.equal(images, same)
    assert int((labels != others).sum()) == 7
    assert set(others.tolist()) <= {0, 1, 2}
    with pytest.raises(ValueError, match=r"share=1.5 must be in \[0, 1\]"):
        data.relabel(1.5, seeded_generator())
