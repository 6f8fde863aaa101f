"""Data sets of image files, on small ones in their makers' formats."""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from examples.research import datasets

GREY = {"cifar100": (0.5071, 0.2673), "tiny-imagenet": (0.4802, 0.2770)}  # mean and std of red


def draw(path, red, size=(40, 30)):
    """A file of one colour, so that its red channel tells which it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 0)).save(path, quality=100)


def reds(data, part):
    """The red channel of each image, as 0..255, and the labels."""
    mean, std = GREY.get(data.name, (0.485, 0.229))
    found = [(x, y) for x, y in data.fixed(part, batch_size=7)]
    middle = torch.cat([x[:, 0, x.shape[2] // 2, x.shape[3] // 2] for x, _ in found])
    return ((middle * std + mean) * 255).round().int().tolist(), torch.cat([y for _, y in found]).tolist()


def check(data, train, test, classes, shape):
    """Each image has its label in the right part, give or take what JPEG does to a colour."""
    assert (data.classes, data.shape) == (classes, shape)
    pooled = [pair for part in ("train", "validation") for pair in zip(*reds(data, part), strict=True)]
    for found, wanted in ((pooled, train), (list(zip(*reds(data, "test"), strict=True)), test)):
        assert len(found) == len(wanted)
        for (red, label), (right, expected) in zip(sorted(found), sorted(wanted), strict=True):
            assert label == expected
            assert abs(red - right) <= 2


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    sums = {}
    rows = {"train": 40, "test": 10}
    for part, count in rows.items():
        pixels = np.zeros((count, 3072), np.uint8)
        pixels[:, :1024] = np.arange(count)[:, None] + (100 if part == "test" else 0)
        labels = [i % 4 for i in range(count)]
        entry = {"data": pixels, "fine_labels": labels, "coarse_labels": [0] * count, "filenames": ["x.png"] * count}
        (folder / part).write_bytes(pickle.dumps(entry, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": list("abcd"), "coarse_label_names": ["a"]}))
    for name in ("train", "test", "meta"):
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    kind = torchvision.datasets.CIFAR100
    monkeypatch.setattr(kind, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(kind, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums["meta"]})
    return tmp_path


def test_cifar100(cifar):
    data = datasets.load("cifar100", folder=cifar)
    check(data, [(i, i % 4) for i in range(40)], [(100 + i, i % 4) for i in range(10)], 4, (3, 32, 32))
    assert data.train_size() == 36
    assert sorted(reds(data, "validation")[1]) == [0, 1, 2, 3]
    assert reds(data, "validation") != reds(datasets.load("cifar100", folder=cifar, seed=1), "validation")


def test_a_changed_cifar100_is_refused(cifar):
    (cifar / "cifar-100-python" / "train").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"cannot read cifar100 .*corrupted.*cifar-100-python/\{train,test,meta\}"):
        datasets.load("cifar100", folder=cifar)


def test_all_inputs_are_normalised_with_the_sets_constants(cifar):
    x, _ = next(datasets.load("cifar100", folder=cifar).fixed("test"))
    torch.testing.assert_close(
        x[0, :, 0, 0], torch.tensor([(100 / 255 - 0.5071) / 0.2673, -0.4865 / 0.2564, -0.4409 / 0.2762])
    )


def test_a_part_of_the_training_set(cifar):
    parts = [datasets.load("cifar100", folder=cifar, train_size=12, seed=seed) for seed in (0, 1)]
    assert reds(parts[0], "train") == reds(parts[1], "train")
    assert sorted(reds(parts[0], "train")[1]) == sorted([0, 1, 2, 3] * 3)
    assert not set(reds(parts[0], "train")[0]) & set(reds(parts[0], "validation")[0])


def test_an_epoch_tells_which_sample_is_which(cifar):
    data = datasets.load("cifar100", folder=cifar, augmentation="none")
    fixed = torch.cat([x for x, _ in data.fixed("train")])
    state, shown = torch.random.get_rng_state(), []
    for x, y, index in data.epoch(7, torch.Generator().manual_seed(0)):
        assert torch.equal(x, fixed[index])
        assert y.tolist() == [reds(data, "train")[1][i] for i in index]
        shown += index.tolist()
    assert len(set(shown)) == len(shown) == 35  # the 36th is alone
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("augmentation", ["basic", "authors"])
def test_workers_change_nothing(cifar, augmentation):
    epochs = []
    for workers, seed in ((0, 5), (2, 5), (0, 6)):
        data = datasets.load("cifar100", folder=cifar, augmentation=augmentation, workers=workers)
        epochs.append(list(data.epoch(12, torch.Generator().manual_seed(seed))))
    for one, two in zip(epochs[0], epochs[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(epochs[0][0][0], epochs[2][0][0])
    first = epochs[0][0][0]  # images of one colour: what differs in form is the crop
    forms = {(x[0] == x[0, 16, 16]).numpy().tobytes() for x in first}
    assert len(forms) > len(first) / 2


def test_partners_are_training_samples_of_the_same_class(cifar):
    data = datasets.load("cifar100", folder=cifar, augmentation="none")
    known, labels = reds(data, "train")
    mean, std = GREY["cifar100"]
    found = data.same_class(torch.arange(4).repeat(20), torch.Generator().manual_seed(0))
    numbers = ((found[:, 0, 16, 16] * std + mean) * 255).round().int().tolist()
    assert [labels[known.index(number)] for number in numbers] == [0, 1, 2, 3] * 20
    assert len(set(numbers)) > 20


def test_tiny_imagenet(tmp_path):
    root, names = tmp_path / "tiny-imagenet-200", ["n02", "n01", "n03"]
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(names))  # in no order, as in the real one
    for number, name in enumerate(names):
        for i in range(10):
            draw(root / "train" / name / "images" / f"{name}_{i}.JPEG", 60 * number + 6 * i, (64, 64))
        (root / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t63\t63\n")
        draw(root / "val" / "images" / f"val_{number}.JPEG", 200 + 10 * number, (64, 64))
    rows = [f"val_{i}.JPEG\t{names[i]}\t0\t32\t44\t62\n" for i in (2, 0, 1)]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    order = {"n02": 1, "n01": 0, "n03": 2}
    train = [(60 * number + 6 * i, order[name]) for number, name in enumerate(names) for i in range(10)]
    test = [(200 + 10 * number, order[name]) for number, name in enumerate(names)]
    check(datasets.load("tiny-imagenet", folder=tmp_path), train, test, 3, (3, 64, 64))
    (root / "val" / "val_annotations.txt").unlink()
    with pytest.raises(ValueError, match=r"val_annotations\.txt"):
        datasets.load("tiny-imagenet", folder=tmp_path)


def test_imagenet(tmp_path):
    for label, name in enumerate(("n01", "n02")):
        for i in range(10):
            draw(tmp_path / "train" / name / f"{name}_{i}.JPEG", 100 * label + 8 * i)
        draw(tmp_path / "val" / name / f"ILSVRC2012_val_0000000{label}.JPEG", 90 + 100 * label)
    data = datasets.load("imagenet", folder=tmp_path)
    train = [(100 * label + 8 * i, label) for label in range(2) for i in range(10)]
    check(data, train, [(90, 0), (190, 1)], 2, (3, 224, 224))
    assert next(data.epoch(4, torch.Generator()))[0].shape == (4, 3, 224, 224)
    (tmp_path / "val" / "n02").rename(tmp_path / "val" / "n05")
    with pytest.raises(ValueError, match="other classes in train/ than in val/"):
        datasets.load("imagenet", folder=tmp_path)


def test_cub200(tmp_path):
    root, tables = tmp_path / "CUB_200_2011", {"images": [], "image_class_labels": [], "train_test_split": []}
    train, test = [], []
    for number in range(1, 25):
        label = (number - 1) // 12
        name = f"{label + 1:03}.Black_footed_Albatross/Bird_{number:04}_{number * 7}.jpg"
        draw(root / "images" / name, 10 * number)
        training = number % 6 != 0
        for table, value in zip(tables.values(), (name, label + 1, int(training)), strict=True):
            table.append(f"{number} {value}\n")
        (train if training else test).append((10 * number, label))
    Image.new("L", (40, 30), 120).save(root / "images" / tables["images"][11].split()[1])  # some are grey
    for table, rows in tables.items():
        (root / f"{table}.txt").write_text("".join(rows))
    (root / "classes.txt").write_text("1 001.Black_footed_Albatross\n2 002.Laysan_Albatross\n")
    check(datasets.load("cub200", folder=tmp_path), train, test, 2, (3, 224, 224))


def test_pets(tmp_path):
    root = tmp_path / "oxford-iiit-pet"
    (root / "annotations").mkdir(parents=True)
    wanted = {}
    for part, count in (("trainval", 20), ("test", 6)):
        rows, wanted[part] = [], []
        for i in range(count):
            name, red = f"{('Abyssinian', 'american_bulldog')[i % 2]}_{part}{i}", 10 * i + 3
            draw(root / "images" / f"{name}.jpg", red)
            rows.append(f"{name} {i % 2 + 1} {i % 2 + 1} 1\n")
            wanted[part].append((red, i % 2))
        (root / "annotations" / f"{part}.txt").write_text("".join(rows))
    check(datasets.load("pets", folder=tmp_path), wanted["trainval"], wanted["test"], 2, (3, 224, 224))


def test_food101(tmp_path):
    root, wanted = tmp_path / "food-101", {}
    (root / "meta").mkdir(parents=True)
    for part, count in (("train", 10), ("test", 3)):
        listed, wanted[part] = {}, []
        for label, name in ((1, "waffles"), (0, "apple_pie")):
            listed[name] = [f"{name}/{label}{part}{i}" for i in range(count)]
            for i, path in enumerate(listed[name]):
                draw(root / "images" / f"{path}.jpg", 100 * label + 9 * i)
                wanted[part].append((100 * label + 9 * i, label))
        (root / "meta" / f"{part}.json").write_text(json.dumps(listed))
    check(datasets.load("food101", folder=tmp_path), wanted["train"], wanted["test"], 2, (3, 224, 224))


def test_cars(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    root, wanted = tmp_path / "stanford_cars", {}
    (root / "devkit").mkdir(parents=True)
    fields = [(f"bbox_{corner}", "O") for corner in ("x1", "y1", "x2", "y2")] + [("class", "O"), ("fname", "O")]
    files = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
    for part, count in (("cars_train", 20), ("cars_test", 5)):
        rows = np.zeros((1, count), dtype=fields)
        wanted[part] = []
        for i in range(count):
            rows[0, i] = (1, 1, 40, 30, i % 2 + 1, f"{i + 1:05}.jpg")
            draw(root / part / f"{i + 1:05}.jpg", 11 * i)
            wanted[part].append((11 * i, i % 2))
        scipy_io.savemat(root / files[part], {"annotations": rows})
    names = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]], dtype=object)
    scipy_io.savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    check(datasets.load("cars", folder=tmp_path), wanted["cars_train"], wanted["cars_test"], 2, (3, 224, 224))


@pytest.mark.parametrize("name", sorted(datasets.SOURCES))
def test_missing_files_say_where_they_belong(name, tmp_path):
    with pytest.raises(ValueError, match=f"cannot read {name} from folder={tmp_path} .*; expected in it: "):
        datasets.load(name, folder=tmp_path)


@pytest.mark.parametrize("name", ["tiny-imagenet", "imagenet", "cub200", "cars"])
def test_no_download_where_there_is_none(name, tmp_path):
    with pytest.raises(ValueError, match="download=True is not possible for this data set; get it by hand"):
        datasets.load(name, folder=tmp_path, download=True)


@pytest.mark.parametrize("name", ["CIFAR100", "OxfordIIITPet", "Food101"])
def test_downloads_are_torchvisions(name, tmp_path, monkeypatch):
    asked = []

    def loader(root, download, **_):
        asked.append((root, download))
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, name, loader)
    with pytest.raises(ValueError, match="no network"):
        datasets.load({"OxfordIIITPet": "pets"}.get(name, name.lower()), folder=tmp_path, download=True)
    assert asked == [(str(tmp_path), True)]
