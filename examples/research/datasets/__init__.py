"""The data sets of the experiments by name."""

from __future__ import annotations

from pathlib import Path

from examples.research.augmentations import check
from examples.research.datasets import small, tabular
from examples.research.datasets.archive import MODULES
from examples.research.datasets.base import Data
from examples.research.datasets.folders import SOURCES, VALIDATION, Folders

AUGMENTATIONS = {
    "digits": "none",
    "fashion-mnist": "basic",
    "noto-scripts": "crop",  # mirrored letters are no letters
    "kanji-fonts": "crop",
    "debian-sections": "none",
} | dict.fromkeys(tabular.NAMES, "none")
NAMES = (*AUGMENTATIONS, *SOURCES)
FOLDER = Path("runs/data")


def load(
    name: str,
    *,
    folder: str | Path | None = None,
    download: bool = False,
    train_size: int | None = None,
    augmentation: str | None = None,
    workers: int = 0,
    seed: int = 0,
    validation: float = VALIDATION,
    process: tuple[int, int] = (0, 1),
) -> Data:
    """Load a data set.

    Args:
        name: one of :data:`NAMES`.
        folder: where its files are (default: runs/data; for fashion-mnist the Debian package's folder).
        download: fetch it first: fashion-mnist, cifar100, pets and food101.
        train_size: use a stratified random part of the training images, the same for every seed; None: all.
        augmentation: one of :data:`examples.research.augmentations.NAMES`; None: ``basic``, but ``none`` for digits,
            tables and debian-sections and ``crop`` for noto-scripts and kanji-fonts.
        workers: processes that read image files; the data sets in memory need none.
        seed: of the validation split; digits and the data sets that are built have a fixed one.
        validation: the share of the training images of :data:`SOURCES` that is held out. Default a tenth.
        process: which of how many processes shares the batches of :data:`SOURCES`. Default the only one.

    Raises:
        ValueError: an argument is unknown or out of range, or the files are missing.
        ImportError: a library that the data set needs is missing.
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r} is unknown; choose one of {', '.join(NAMES)}")
    augmentation = check(AUGMENTATIONS.get(name, "basic") if augmentation is None else augmentation)
    path = None if folder is None else Path(folder)
    if download and name in ("digits", *tabular.NAMES, *MODULES):
        raise ValueError(f"download=True is not possible for {name}: digits and tables need none, the others are built")
    if name in tabular.NAMES:
        if train_size is not None or augmentation != "none":
            raise ValueError(f"train_size and augmentation are not for {name}: pass a configuration's shots")
        return tabular.table(name)
    if name == "digits":
        return small.digits(train_size, augmentation)
    if name in MODULES:
        return small.built(name, path, train_size, augmentation)
    if name == "fashion-mnist":
        return small.fashion_mnist(path, download, train_size, augmentation, seed)
    return Folders(name, path or FOLDER, download, train_size, augmentation, workers, seed, validation, process)
