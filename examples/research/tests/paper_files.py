"""A few images of each data set of the paper in its makers' format, and weights under torchvision's names."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torchvision
from PIL import Image

from examples.research import networks
from examples.research.datasets import listings
from examples.research.paper.training import weights_file

CLASSES = 4
PER_CLASS = 4  # of the training images; one of the test images
PRETRAINED = ("resnet18", "resnet34", "resnet50", "shufflenetv2", "efficientnet-b0")
# A masked autoencoder of this size in place of ViT-B's.
TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
TINY |= {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}
TINY |= {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 64}
CIFAR10_IMAGES = 4000  # as many as FixMatch takes with labels


def make(root: Path, seed: int = 0) -> Path:
    """Write all of them into a folder; each class has a color of its own, so that a few steps learn something."""
    random = np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    for write in (_cifar100, _cifar10, _tiny_imagenet, _imagenet, _cub200, _pets, _food101, _cars):
        write(root, random)
    return root


def weights(root: Path, names: tuple[str, ...] = PRETRAINED) -> None:
    """Write random weights of ImageNet's networks under the names of torchvision's files."""
    for name in names:
        path, _ = weights_file(name, root)
        path.parent.mkdir(exist_ok=True)
        torch.save(networks.build(name, 1000, (3, 224, 224)).state_dict(), path)


@contextmanager
def accepted() -> Iterator[None]:
    """Inside the block such files count as whole and unchanged: torchvision knows the real ones by their checksums."""
    cifar100, cifar10 = torchvision.datasets.CIFAR100, torchvision.datasets.CIFAR10
    with (
        mock.patch.dict(listings.SIZES, sizes()),
        mock.patch.object(cifar100, "train_list", [["train", None]]),
        mock.patch.object(cifar100, "test_list", [["test", None]]),
        mock.patch.object(cifar100, "meta", {**cifar100.meta, "md5": None}),
        mock.patch.object(cifar10, "train_list", [[name, None] for name, _ in cifar10.train_list]),
        mock.patch.object(cifar10, "test_list", [["test_batch", None]]),
        mock.patch.object(cifar10, "meta", {**cifar10.meta, "md5": None}),
    ):
        yield


def sizes() -> dict[str, tuple[int, int, int]]:
    """Classes, training and test images of what :func:`make` writes."""
    found = dict.fromkeys(listings.SIZES, (CLASSES, CLASSES * PER_CLASS, CLASSES))
    return found | {"cifar10": (10, CIFAR10_IMAGES, 10)}


def _labels(count: int, classes: int = CLASSES) -> list[int]:
    return [number % classes for number in range(count)]


def _pixels(random: Any, labels: list[int], side: int) -> np.ndarray:
    """Noise and the color of the class, (count, side, side, 3) uint8."""
    colors = np.random.default_rng(7).integers(0, 200, (10, 3))
    noise = random.integers(0, 56, (len(labels), side, side, 3))
    found: np.ndarray = (colors[labels][:, None, None] + noise).astype(np.uint8)
    found[:, 0, 0], found[:, 0, 1] = 0, 255  # what FixMatch's views take for the range
    return found


def _write(path: Path, random: Any, label: int, side: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_pixels(random, [label], side)[0]).save(path, format="JPEG")


def _batch(path: Path, random: Any, labels: list[int], key: str) -> None:
    rows = _pixels(random, labels, 32).transpose(0, 3, 1, 2).reshape(len(labels), -1)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps({"data": rows, key: labels}, protocol=2))


def _cifar100(root: Path, random: Any) -> None:
    folder = root / "cifar-100-python"
    _batch(folder / "train", random, _labels(CLASSES * PER_CLASS), "fine_labels")
    _batch(folder / "test", random, _labels(CLASSES), "fine_labels")
    names = ["apple", "leopard", "tiger", "lion"]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=2))


def _cifar10(root: Path, random: Any) -> None:
    folder = root / "cifar-10-batches-py"
    for number in range(1, 6):
        _batch(folder / f"data_batch_{number}", random, _labels(CIFAR10_IMAGES // 5, 10), "labels")
    _batch(folder / "test_batch", random, _labels(10, 10), "labels")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, protocol=2))


def _tiny_imagenet(root: Path, random: Any) -> None:
    folder, rows = root / "tiny-imagenet-200", []
    for label in range(CLASSES):
        for number in range(PER_CLASS):
            _write(folder / "train" / f"n0{label}" / "images" / f"n0{label}_{number}.JPEG", random, label, 64)
        _write(folder / "val" / "images" / f"val_{label}.JPEG", random, label, 64)
        rows.append(f"val_{label}.JPEG\tn0{label}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))


def _imagenet(root: Path, random: Any) -> None:
    for label in range(CLASSES):
        for part, count in (("train", PER_CLASS), ("val", 1)):
            for number in range(count):
                _write(root / "imagenet" / part / f"n0{label}" / f"{part}_{number}.JPEG", random, label, 250)


def _cub200(root: Path, random: Any) -> None:
    folder = root / "CUB_200_2011"
    tables: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": []}
    for number, label in enumerate(_labels(CLASSES * (PER_CLASS + 1)), 1):
        name = f"{label + 1:03}.bird/bird_{number}.jpg"
        _write(folder / "images" / name, random, label, 240)
        training = int(number <= CLASSES * PER_CLASS)
        for rows, value in zip(tables.values(), (name, label + 1, training), strict=True):
            rows.append(f"{number} {value}\n")
    for table, rows in tables.items():
        (folder / f"{table}.txt").write_text("".join(rows))
    (folder / "classes.txt").write_text("".join(f"{label + 1} {label + 1:03}.bird\n" for label in range(CLASSES)))


def _pets(root: Path, random: Any) -> None:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for part, count in (("trainval", CLASSES * PER_CLASS), ("test", CLASSES)):
        rows = []
        for number, label in enumerate(_labels(count)):
            name = f"pet{label}_{part}{number}"
            _write(folder / "images" / f"{name}.jpg", random, label, 240)
            rows.append(f"{name} {label + 1} 1 1\n")
        (folder / "annotations" / f"{part}.txt").write_text("".join(rows))


def _food101(root: Path, random: Any) -> None:
    folder = root / "food-101"
    (folder / "meta").mkdir(parents=True)
    for part, count in (("train", PER_CLASS), ("test", 1)):
        listed = {f"food{k}": [f"food{k}/{part}{i}" for i in range(count)] for k in range(CLASSES)}
        for label, paths in enumerate(listed.values()):
            for path in paths:
                _write(folder / "images" / f"{path}.jpg", random, label, 240)
        (folder / "meta" / f"{part}.json").write_text(json.dumps(listed))


def _cars(root: Path, random: Any) -> None:
    from scipy import io

    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    fields = [(f"bbox_{corner}", "O") for corner in ("x1", "y1", "x2", "y2")] + [("class", "O"), ("fname", "O")]
    files = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
    for part, count in (("cars_train", CLASSES * PER_CLASS), ("cars_test", CLASSES)):
        rows = np.zeros((1, count), dtype=fields)
        for number, label in enumerate(_labels(count)):
            rows[0, number] = (1, 1, 40, 30, label + 1, f"{number + 1:05}.jpg")
            _write(folder / part / f"{number + 1:05}.jpg", random, label, 240)
        io.savemat(folder / files[part], {"annotations": rows})
    io.savemat(folder / "devkit" / "cars_meta.mat", {"class_names": np.array([list("abcd")], dtype=object)})


if __name__ == "__main__":
    import sys

    from examples.research.paper.command import main

    place = Path(sys.argv[1])
    if not place.exists():
        make(place)
        weights(place)
    with accepted():
        main(sys.argv[2:])
