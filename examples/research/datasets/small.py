"""Data sets that fit into memory: digits, Fashion-MNIST, and those that are built here."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.research.datasets.archive import FILES, read
from examples.research.datasets.base import InMemory
from examples.research.datasets.idx import DEBIAN, read_idx
from examples.research.datasets.splits import PARTS, others, stratified, subset, train_and_validation

CONTENTS = {  # the arrays of the class names, and those of the inputs after the part's name
    "noto-scripts": ("scripts", "images"),
    "kanji-fonts": ("kanji", "images"),
    "debian-sections": ("sections", "features"),
}
FASHION_VALIDATION = 10_000  # of the 60,000 training images
IDX_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
FASHION_NAMES = (
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


def digits(train_size: int | None, augmentation: str) -> InMemory:
    """scikit-learn's 1797 digits of 8x8: 60 % for training, 15 % for validation, 25 % for the test, always the same."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits are in scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    x, y = torch.tensor(found.images).float().unsqueeze(1) / 16, torch.tensor(found.target).long()
    test = stratified(y, round(0.25 * len(y)), seed=0)
    rest = others(len(y), test)
    held_out = stratified(y[rest], round(0.15 * len(y)), seed=0)
    validation, train = rest[held_out], rest[others(len(rest), held_out)]
    train = train[subset(y[train], train_size)]
    parts = {name: (x[part], y[part]) for name, part in zip(PARTS, (train, validation, test), strict=True)}
    return InMemory("digits", [str(digit) for digit in range(10)], parts, augmentation)


def fashion_mnist(
    folder: Path | None, download: bool, train_size: int | None, augmentation: str, seed: int
) -> InMemory:
    """Zalando's articles of 28x28: 50,000 for training, 10,000 of the training set for validation, 10,000 for the test.

    Args:
        folder: of the four .gz files (default: where Debian's package dataset-fashion-mnist puts them), or, to
            ``download``, torchvision's root (default: runs/data).
    """
    if download:
        arrays = _downloaded(folder or Path("runs/data"))
    else:
        arrays = [read_idx((folder or DEBIAN) / f"{name}-ubyte.gz") for name in IDX_FILES]
    x, y, x_test, y_test = arrays
    y, y_test = y.long(), y_test.long()
    validation = min(FASHION_VALIDATION, len(y) // 6)
    train, held_out = train_and_validation(y, validation, train_size, seed)
    found = ((x[train], y[train]), (x[held_out], y[held_out]), (x_test, y_test))
    parts = {name: (images.unsqueeze(1), labels) for name, (images, labels) in zip(PARTS, found, strict=True)}
    return InMemory("fashion-mnist", FASHION_NAMES, parts, augmentation)


def _downloaded(folder: Path) -> list[torch.Tensor]:
    try:
        from torchvision.datasets import FashionMNIST
    except ImportError as error:
        raise ImportError("download=True needs torchvision: pip install torchvision") from error
    parts = [FashionMNIST(str(folder), train=train, download=True) for train in (True, False)]
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def built(name: str, file: Path | None, train_size: int | None, augmentation: str) -> InMemory:
    """Characters of fonts, 28x28, or words of descriptions, 1x1xV: see the module that builds them.

    Args:
        name: a key of :data:`examples.research.datasets.archive.MODULES`.
        file: what that module's command wrote (default: in runs/data), or the folder it is in.
    """
    if name == "debian-sections" and augmentation != "none":
        raise ValueError(f"augmentation={augmentation!r} is for images; {name} takes 'none'")
    path = file or FILES[name]
    arrays = read(path / FILES[name].name if path.is_dir() else path, name)
    classes, inputs = CONTENTS[name]
    parts = {}
    for part in PARTS:
        x, labels = (torch.from_numpy(arrays[f"{part}_{what}"]) for what in (inputs, "labels"))
        kept = subset(labels, train_size if part == "train" else None)
        x = x[kept] if x.dim() == 4 else x[kept].reshape(len(kept), 1, -1, x.shape[-1])
        parts[part] = (x, labels[kept])
    return InMemory(name, arrays[classes].tolist(), parts, augmentation)
