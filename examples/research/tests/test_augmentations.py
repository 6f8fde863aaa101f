"""Augmentations against brute force: every crop and mirror image that there can be."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import v2

from examples.research import augmentations
from examples.research.augmentations import Cutout, View, batch_crop, evaluation, seeded, training

SMALL = View((20, 20), (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
MEAN, STD = (torch.tensor(values)[:, None, None] for values in (SMALL.mean, SMALL.std))


def picture(side=20, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def pixels(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def windows(x, fill=0):
    """All 81 crops of (C, H, W) with a border of 4, and then their mirror images."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (4,) * 4, value=fill)
    crops = [padded[:, top : top + height, left : left + width] for top in range(9) for left in range(9)]
    return torch.stack(crops + [crop.flip(-1) for crop in crops])


def which(x, candidates):
    """The number of the only candidate that equals x to a thousandth of a grey level, or None."""
    close = ((x - candidates).abs().flatten(1).max(1).values < 1e-5).nonzero().flatten().tolist()
    return close[0] if len(close) == 1 else None


@pytest.mark.parametrize(("flip", "kinds"), [(True, 162), (False, 81)])
def test_batch_crop_finds_every_window(flip, kinds):
    x = torch.rand(3, 6, 5, generator=torch.Generator().manual_seed(0))
    candidates = windows(x)
    out = batch_crop(x.expand(2000, -1, -1, -1), torch.Generator().manual_seed(1), flip=flip)
    assert {which(one, candidates) for one in out} == set(range(kinds))


def test_batch_crop_keeps_bytes():
    x = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    assert batch_crop(x, torch.Generator().manual_seed(0), flip=True).dtype == torch.uint8


def test_cutout_squares():
    x = torch.rand(3, 32, 24) + 1
    before, areas, torches = x.clone(), set(), torch.random.get_rng_state()
    expected = set()
    for row in range(32):
        for column in range(24):
            inside = [(i, j) for i in range(row - 8, row + 8) for j in range(column - 8, column + 8)]
            expected.add(frozenset((i, j) for i, j in inside if 0 <= i < 32 and 0 <= j < 24))
    for seed in range(300):
        out = seeded(Cutout(), x, seed)
        holes = (out == 0).all(0)
        assert torch.equal(out[:, ~holes], x[:, ~holes])
        assert frozenset(map(tuple, holes.nonzero().tolist())) in expected
        areas.add(int(holes.sum()))
    assert max(areas) == 256
    assert min(areas) < 100
    assert torch.equal(x, before)
    assert torch.equal(torches, torch.random.get_rng_state())


@pytest.mark.parametrize(("name", "kinds"), [("crop", range(81)), ("basic", range(162))])
def test_crop_and_basic_are_normalised_windows(name, kinds):
    image = picture()
    candidates = (windows(pixels(image) / 255) - MEAN) / STD
    found = {which(seeded(training(name, SMALL), image, seed), candidates) for seed in range(600)}
    assert found <= set(kinds)
    assert len(found) > 0.9 * len(kinds)


def test_authors_crop_on_grey_then_cut_to_the_mean(monkeypatch):
    policies = []
    monkeypatch.setattr(v2, "AutoAugment", lambda policy: policies.append(policy) or v2.Identity())
    image = picture()
    candidates = (windows(pixels(image) / 255, fill=128 / 255) - MEAN) / STD
    transform = training("authors", SMALL)
    assert policies == [v2.AutoAugmentPolicy.CIFAR10]
    found = set()
    for seed in range(100):
        out = seeded(transform, image, seed)
        hole = (out == 0).all(0)
        assert hole.sum() >= 64
        found.add(which(out[:, ~hole], candidates[:, :, ~hole]))
    assert None not in found
    assert max(found) > 80 > min(found)


@pytest.mark.parametrize(("name", "step"), [("authors", "AutoAugment"), ("trivial", "TrivialAugmentWide")])
def test_policies_change_pictures_as_their_seed_says(name, step, monkeypatch):
    image, transform = picture(), training(name, SMALL)
    state = torch.random.get_rng_state()
    first, second = ([seeded(transform, image, seed) for seed in range(20)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({out.numpy().tobytes() for out in first}) == 20
    assert torch.equal(state, torch.random.get_rng_state())
    monkeypatch.setattr(v2, step, lambda *_: v2.Identity())
    without = training(name, SMALL)
    assert sum(not torch.equal(seeded(without, image, seed), first[seed]) for seed in range(20)) > 10


def test_the_seed_leaves_other_devices_alone(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("this would seed the GPU"))
    seeded(lambda x: x, torch.zeros(1), 5)


def test_evaluation_normalises():
    x = torch.tensor([[[0]], [[51]], [[255]]], dtype=torch.uint8)
    out = evaluation(View((1, 1), SMALL.mean, SMALL.std))(x)
    torch.testing.assert_close(out, torch.tensor([[[-2.5]], [[-0.8]], [[1.4]]]))
    assert type(out) is torch.Tensor
    assert torch.equal(training("none", SMALL)(picture()), evaluation(SMALL)(picture()))


def test_evaluation_of_large_pictures_equals_pillow():
    image = picture(64).resize((96, 64), Image.Resampling.BICUBIC)
    view = View((28, 28), (0.0,) * 3, (1.0,) * 3, crop="cut")
    expected = image.resize((48, 32), Image.Resampling.BILINEAR).crop((10, 2, 38, 30))
    torch.testing.assert_close(evaluation(view)(image), pixels(expected) / 255)


def test_cut_crops_are_parts_of_the_resized_picture():
    image = picture(32).resize((96, 64), Image.Resampling.BICUBIC)
    resized = pixels(image.resize((48, 32), Image.Resampling.BILINEAR)) / 255
    view = View((28, 28), (0.0,) * 3, (1.0,) * 3, crop="cut")
    crops = torch.stack([resized[:, i : i + 28, j : j + 28] for i in range(5) for j in range(21)])
    found = {which(seeded(training("crop", view), image, seed), crops) for seed in range(100)}
    assert None not in found
    assert len(found) > 40


def test_resized_crops_show_small_and_large_parts():
    ramp = Image.fromarray(np.repeat(np.arange(256, dtype=np.uint8)[None], 256, 0)).convert("RGB")
    view = View((28, 28), (0.0,) * 3, (1.0,) * 3, crop="resized")
    spans = [float(out.max() - out.min()) for out in (seeded(training("crop", view), ramp, s) for s in range(100))]
    assert min(spans) < 0.4
    assert max(spans) > 0.9


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="augmentation='flips' is unknown; choose one of none, crop, basic"):
        training("flips", SMALL)
    with pytest.raises(ValueError, match="crop='x' is unknown; choose one of padded, cut, resized"):
        training("basic", View((20, 20), SMALL.mean, SMALL.std, crop="x"))
    with pytest.raises(ValueError, match=r"cuts 16 pixels out of \(8, 8\); choose 'basic'"):
        training("authors", View((8, 8), SMALL.mean, SMALL.std))
    assert augmentations.check("basic") == "basic"


def test_rand_is_timms_with_the_setting_of_its_recipes():
    """For each seed what timm gives if Python's and numpy's generators begin with the number that torch draws."""
    view = View((64, 64), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop="cut")
    options = {"translate_const": 28, "img_mean": (124, 116, 104)}
    timms = rand_augment_transform("rand-m9-mstd0.5-inc1", options)
    ours, image = augmentations.TimmRandAugment(view), picture(64)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - timm's own
    found = [pixels(seeded(ours, image, seed)) for seed in range(20)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    for seed, one in enumerate(found):
        number = int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(seed)))
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        assert torch.equal(one, pixels(timms(image)))
    assert len({one.numpy().tobytes() for one in found}) > 10
    with_names = [type(step).__name__ for step in training("rand", view).transforms]
    assert with_names[:4] == ["Resize", "RandomCrop", "RandomHorizontalFlip", "TimmRandAugment"]
    random.setstate(before[0])
