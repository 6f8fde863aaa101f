"""Data sets of image files in their makers' formats, as numbered images with labels.

Each function takes the folder that has the data set's own folder, and returns the training and the test images.
:data:`SIZES` has what the whole sets have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Listing:
    """``pictures[i][0]`` is a PIL image in RGB, ``labels`` (count,) int64 say which of ``names``."""

    pictures: Any
    labels: Tensor
    names: Sequence[str]


# Classes, training images and test images.
SIZES = {
    "cifar10": (10, 50_000, 10_000),
    "cifar100": (100, 50_000, 10_000),
    "cifar100-224": (100, 50_000, 10_000),
    "tiny-imagenet": (200, 100_000, 10_000),
    "tiny-imagenet-224": (200, 100_000, 10_000),
    "imagenet": (1000, 1_281_167, 50_000),
    "imagenet-resized": (1000, 1_281_167, 50_000),
    "cub200": (200, 5_994, 5_794),
    "pets": (37, 3_680, 3_669),
    "food101": (101, 75_750, 25_250),
    "cars": (196, 8_144, 8_041),
}


class Files:
    """Pictures by path."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int]) -> None:
        self.paths, self.labels = list(paths), list(labels)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        from torchvision.datasets.folder import default_loader

        return default_loader(self.paths[number]), self.labels[number]


def cifar100(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """Python version: cifar-100-python/{train,test,meta}."""
    from torchvision.datasets import CIFAR100

    return _cifar(CIFAR100, folder, download)


def cifar10(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """Python version: cifar-10-batches-py/{data_batch_1,...,data_batch_5,test_batch,batches.meta}."""
    from torchvision.datasets import CIFAR10

    return _cifar(CIFAR10, folder, download)


def tiny_imagenet(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """tiny-imagenet-200/train/<wnid>/images and val/val_annotations.txt; its validation set is the test set here."""
    from torchvision.datasets import ImageFolder

    _refuse_download(download, "http://cs231n.stanford.edu/tiny-imagenet-200.zip")
    root = folder / "tiny-imagenet-200"
    train = ImageFolder(str(root / "train"))
    rows = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    labels = [train.class_to_idx[row[1]] for row in rows]
    test = Files([root / "val" / "images" / row[0] for row in rows], labels)
    return _pair([(train, train.targets), (test, labels)], train.classes)


def imagenet(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """train/<wnid> and val/<wnid>, the usual layout; the validation set is the test set here."""
    from torchvision.datasets import ImageFolder

    _refuse_download(download, "https://image-net.org")
    train, test = (ImageFolder(str(folder / part)) for part in ("train", "val"))
    if train.classes != test.classes:
        raise ValueError(f"folder={folder} has other classes in train/ than in val/: sort val/ into folders of classes")
    return _pair([(train, train.targets), (test, test.targets)], train.classes)


def cub200(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """CUB_200_2011/{images,image_class_labels,train_test_split,classes}.txt and images/."""
    _refuse_download(download, "https://www.vision.caltech.edu/datasets/cub_200_2011")
    root = folder / "CUB_200_2011"
    tables = ("images", "image_class_labels", "train_test_split", "classes")
    paths, labels, training, names = (_table(root / f"{table}.txt") for table in tables)
    parts = []
    for wanted in ("1", "0"):
        numbers = [number for number in paths if training[number] == wanted]
        found = [int(labels[number]) - 1 for number in numbers]
        parts.append((Files([root / "images" / paths[number] for number in numbers], found), found))
    return _pair(parts, list(names.values()))


def pets(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """oxford-iiit-pet/annotations/{trainval,test}.txt and images/."""
    from torchvision.datasets import OxfordIIITPet

    parts = [OxfordIIITPet(str(folder), split=split, download=download) for split in ("trainval", "test")]
    return _pair([(part, part._labels) for part in parts], parts[0].classes)


def food101(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """food-101/meta/{train,test}.json and images/."""
    from torchvision.datasets import Food101

    parts = [Food101(str(folder), split=split, download=download) for split in ("train", "test")]
    return _pair([(part, part._labels) for part in parts], parts[0].classes)


def cars(folder: Path, download: bool) -> tuple[Listing, Listing]:
    """stanford_cars/{devkit,cars_train,cars_test,cars_test_annos_withlabels.mat}."""
    from torchvision.datasets import StanfordCars

    _refuse_download(download, "its makers' page is gone; torchvision's StanfordCars describes the layout")
    parts = [StanfordCars(str(folder), split=split) for split in ("train", "test")]
    return _pair([(part, [int(label) for _, label in part._samples]) for part in parts], parts[0].classes)


def _cifar(kind: Any, folder: Path, download: bool) -> tuple[Listing, Listing]:
    parts = [kind(str(folder), train=train, download=download) for train in (True, False)]
    return _pair([(part, part.targets) for part in parts], parts[0].classes)


def _pair(parts: Sequence[tuple[Any, Sequence[int]]], names: Sequence[str]) -> tuple[Listing, Listing]:
    train, test = (Listing(pictures, torch.tensor(labels, dtype=torch.int64), names) for pictures, labels in parts)
    return train, test


def _table(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines())


def _refuse_download(download: bool, source: str) -> None:
    if download:
        raise ValueError(f"download=True is not possible for this data set; get it by hand: {source}")
