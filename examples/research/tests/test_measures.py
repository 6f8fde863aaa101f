"""Measures of predictions by hand."""

import math

import pytest
import torch

from examples.research.measures import fit_temperature, quality
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


def test_relabelling_is_of_a_share_and_to_other_classes():
    data, noisy = in_memory(count=21), in_memory(count=21)
    noisy.relabel(1 / 3, seeded_generator())
    (images, labels), (same, others) = everything(data, "train"), everything(noisy, "train")
    assert torch.equal(images, same)
    assert int((labels != others).sum()) == 7
    assert set(others.tolist()) <= {0, 1, 2}
    with pytest.raises(ValueError, match=r"share=1.5 must be in \[0, 1\]"):
        data.relabel(1.5, seeded_generator())
