"""Splits, data sets in memory and the ways to load them."""

import gzip
import struct
from collections import Counter

import numpy as np
import pytest
import torch

from examples.research import datasets
from examples.research.augmentations import View, seeded, training
from examples.research.datasets.archive import save
from examples.research.datasets.base import InMemory, batches
from examples.research.datasets.splits import others, stratified, subset, train_and_validation

LABELS = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[torch.randperm(100, generator=torch.Generator().manual_seed(9))]


def seeded_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def in_memory(augmentation="none", dtype=torch.uint8, count=21, channels=1, side=18):
    x = torch.randint(256, (count, channels, side, side), generator=seeded_generator()).to(dtype)
    parts = {"train": (x, torch.arange(count) % 3), "validation": (x[:4], torch.tensor([0, 1, 2, 0]))}
    return InMemory("some", "abc", {**parts, "test": (x[4:7], torch.tensor([1, 2, 0]))}, augmentation)


def everything(data, part):
    xs, ys = zip(*data.fixed(part), strict=True)
    return torch.cat(xs), torch.cat(ys)


@pytest.mark.parametrize("count", [1, 10, 33, 50, 99, 100])
def test_stratified_is_in_proportion(count):
    chosen = stratified(LABELS, count, seed=4)
    assert len(set(chosen.tolist())) == count
    counts = Counter(LABELS[chosen].tolist())
    assert all(abs(counts[label] - count * share) <= 1 for label, share in ((0, 0.5), (1, 0.3), (2, 0.2)))
    assert chosen.tolist() == sorted(chosen.tolist())


def test_stratified_is_random_nested_and_exact():
    assert Counter(LABELS[stratified(LABELS, 10, seed=1)].tolist()) == {0: 5, 1: 3, 2: 2}
    assert (
        stratified(LABELS, 10, 1).tolist() == stratified(LABELS, 10, 1).tolist() != stratified(LABELS, 10, 2).tolist()
    )
    assert set(stratified(LABELS, 10, 1).tolist()) < set(stratified(LABELS, 40, 1).tolist())
    picked = Counter(int(i) for seed in range(200) for i in stratified(LABELS, 10, seed))
    assert len(picked) == 100  # all samples have their chance
    assert max(picked.values()) < 45


def test_training_and_validation_share_nothing():
    train, validation = train_and_validation(LABELS, 20, None, seed=0)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(100))
    assert Counter(LABELS[validation].tolist()) == {0: 10, 1: 6, 2: 4}
    assert validation.tolist() != train_and_validation(LABELS, 20, None, seed=1)[1].tolist()


def test_a_smaller_training_set_is_the_same_for_every_seed():
    (train, validation), (again, other) = (train_and_validation(LABELS, 20, 40, seed) for seed in (0, 1))
    assert train.tolist() == again.tolist() == subset(LABELS, 40).tolist()
    assert validation.tolist() != other.tolist()
    for held_out in (validation, other):
        assert len(held_out) == 20
        assert not set(held_out.tolist()) & set(train.tolist())
        assert Counter(LABELS[held_out].tolist()) == {0: 10, 1: 6, 2: 4}
    for wrong in (1, 81):
        with pytest.raises(ValueError, match=f"train_size={wrong} must be from 2 to 80"):
            train_and_validation(LABELS, 20, wrong, seed=0)


def test_others():
    assert others(5, torch.tensor([3, 0])).tolist() == [1, 2, 4]


def test_batches_drop_only_a_lone_last_sample():
    assert [len(batch) for batch in batches(21, 5, seeded_generator())] == [5, 5, 5, 5]
    assert [len(batch) for batch in batches(22, 5, seeded_generator())] == [5, 5, 5, 5, 2]
    assert [len(batch) for batch in batches(3, 1, seeded_generator())] == [1, 1, 1]
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        batches(3, 0, seeded_generator())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_all_parts_are_normalised_by_the_training_part(dtype):
    data = in_memory(dtype=dtype, channels=2)
    x, y = everything(data, "train")
    raw = torch.randint(256, (21, 2, 18, 18), generator=seeded_generator()).numpy().astype(np.float64)
    mean, std = raw.mean((0, 2, 3), keepdims=True), raw.std((0, 2, 3), keepdims=True, ddof=1)
    expected = torch.from_numpy((raw - mean) / std).float()
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(everything(data, "test")[0], expected[4:7])
    torch.testing.assert_close(everything(data, "validation")[0], expected[:4])
    assert everything(data, "test")[1].tolist() == [1, 2, 0]
    assert y.dtype == torch.int64
    assert data.shape == (2, 18, 18)


def test_an_epoch_shows_each_sample_once_under_its_number():
    data = in_memory()
    fixed, labels = everything(data, "train")
    shown = []
    for x, y, index in data.epoch(4, seeded_generator()):
        assert torch.equal(x, fixed[index])
        assert torch.equal(y, labels[index])
        assert index.dtype == torch.int64
        shown += index.tolist()
    assert len(shown) == len(set(shown)) == 20  # the 21st is alone
    assert shown != sorted(shown)


@pytest.mark.parametrize("augmentation", ["none", "crop", "basic", "authors", "trivial"])
def test_the_generator_decides_everything(augmentation):
    data, state = in_memory(augmentation), torch.random.get_rng_state()
    first, second, third = (list(data.epoch(7, seeded_generator(seed))) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0][2], third[0][2])
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(x.dtype == torch.float32 and x.shape[1:] == (1, 18, 18) for x, _, _ in first)
    fixed = everything(data, "train")[0]
    assert all(torch.equal(x, fixed[index]) for x, _, index in first) == (augmentation == "none")


def test_pictures_of_an_epoch_are_those_of_the_transform():
    data = in_memory("trivial")
    raw = torch.randint(256, (21, 1, 18, 18), generator=seeded_generator()).to(torch.uint8)
    scaled = raw.double() / 255
    view = View((18, 18), (float(scaled.mean()),), (float(scaled.std()),))
    generator = seeded_generator(5)
    order = torch.randperm(21, generator=generator)[:6]
    seeds = torch.randint(2**62, (6,), generator=generator).tolist()
    expected = [seeded(training("trivial", view), raw[i], s) for i, s in zip(order, seeds, strict=True)]
    torch.testing.assert_close(next(data.epoch(6, seeded_generator(5)))[0], torch.stack(expected))


def test_a_partner_is_a_random_training_sample_of_the_same_class():
    data = in_memory()
    x, y = next(data.fixed("train"))
    asked = torch.tensor([2, 0, 1, 1] * 600)
    found = data.same_class(asked, seeded_generator())
    numbers = (found[:, None] == x[None]).flatten(2).all(2).float().argmax(1)
    assert torch.equal(found, x[numbers])
    assert torch.equal(y[numbers], asked)
    for label in range(3):
        counts = numbers[asked == label].bincount(minlength=len(y))[y == label]
        expected = (asked == label).sum() / (y == label).sum()
        assert (counts - expected).abs().max() < 5 * expected.sqrt()


@pytest.mark.parametrize("augmentation", ["crop", "trivial"])
def test_the_generator_decides_partners_and_their_augmentation(augmentation):
    data, state = in_memory(augmentation), torch.random.get_rng_state()
    labels = torch.tensor([2, 0, 1, 1])
    first, second, other = (data.same_class(labels, seeded_generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_wrong_parts_and_augmentations():
    with pytest.raises(ValueError, match="part='dev' is unknown; choose one of train, validation, test"):
        next(in_memory().fixed("dev"))
    with pytest.raises(ValueError, match=r"augmentation='trivial' needs uint8 images, not torch\.float32"):
        in_memory("trivial", torch.float32)


def test_digits():
    from sklearn.datasets import load_digits

    raw = load_digits()
    pictures = {image.tobytes() for image in raw.images}
    data, parts = datasets.load("digits"), {}
    for part, size in (("train", 1078), ("validation", 270), ("test", 449)):
        x, y = everything(data, part)
        assert len(y) == size
        shares = np.bincount(y, minlength=10) / size - np.bincount(raw.target) / len(raw.target)
        assert abs(shares).max() < 0.01
        parts[part] = x
    union = torch.cat(list(parts.values()))
    assert len({x.numpy().tobytes() for x in union}) == len(pictures)  # each sample is in exactly one part
    torch.testing.assert_close(parts["train"].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(parts["train"].std(), torch.tensor(1.0))
    small = datasets.load("digits", train_size=50, seed=3)
    assert (small.train_size(), data.train_size(), data.classes, data.shape) == (50, 1078, 10, (1, 8, 8))
    assert Counter(everything(small, "train")[1].tolist()).most_common()[-1][1] >= 4


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_fashion_mnist(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (90, 28, 28), np.uint8)
    labels = np.arange(90, dtype=np.uint8) % 10
    for name, count in (("train", 60), ("t10k", 30)):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte.gz", images[:count] if name == "train" else images[60:])
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", labels[:count] if name == "train" else labels[60:])
    data = datasets.load("fashion-mnist", folder=tmp_path)
    assert [len(everything(data, part)[1]) for part in ("train", "validation", "test")] == [50, 10, 30]
    assert sorted(everything(data, "validation")[1].tolist()) == list(range(10))
    x, y = everything(data, "test")
    assert y.tolist() == [i % 10 for i in range(60, 90)]
    spread = torch.from_numpy(images[60:]).double()
    torch.testing.assert_close((x[:, 0] - x.mean()) / x.std(), ((spread - spread.mean()) / spread.std()).float())
    other = datasets.load("fashion-mnist", folder=tmp_path, seed=1)
    assert not torch.equal(everything(other, "validation")[0], everything(data, "validation")[0])
    assert data.augmentation == "basic"


def test_noto_scripts(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 28), np.uint8)
    arrays = {"scripts": np.array(["Goth", "Ogam"])}
    for part, rows in (("train", slice(0, 20)), ("validation", slice(20, 24)), ("test", slice(24, 30))):
        arrays |= {f"{part}_images": images[rows], f"{part}_labels": np.arange(30)[rows] % 2}
    save(arrays, tmp_path / "noto-scripts.npz")
    for folder in (tmp_path, tmp_path / "noto-scripts.npz"):
        data = datasets.load("noto-scripts", folder=folder, train_size=8)
        assert (data.train_size(), data.classes, data.shape, data.augmentation) == (8, 2, (1, 28, 28), "crop")
        assert Counter(everything(data, "train")[1].tolist()) == {0: 4, 1: 4}
        assert [len(everything(data, part)[1]) for part in ("validation", "test")] == [4, 6]


def test_load_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ValueError, match="name='mnist' is unknown; choose one of digits, fashion-mnist, noto-scripts"):
        datasets.load("mnist")
    with pytest.raises(ValueError, match="augmentation='x' is unknown"):
        datasets.load("digits", augmentation="x")
    with pytest.raises(ValueError, match="train_size=1079 must be from 2 to 1078"):
        datasets.load("digits", train_size=1079)
    with pytest.raises(ValueError, match="download=True is not possible for digits"):
        datasets.load("digits", download=True)
    with pytest.raises(ValueError, match="dataset-fashion-mnist"):
        datasets.load("fashion-mnist", folder=tmp_path)
    with pytest.raises(ValueError, match=r"build it: python -m examples\.research\.datasets\.noto"):
        datasets.load("noto-scripts", folder=tmp_path)
