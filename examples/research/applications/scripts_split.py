"""The 100 Noto scripts in two: ten to fine-tune on with a few images of each, and the others to pretrain on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from examples.research import datasets
from examples.research.datasets import archive
from examples.research.datasets.base import InMemory, few
from examples.research.datasets.splits import PARTS

NAME = "noto-scripts"
HELD_OUT = slice(9, None, 10)  # the 10th, 20th, ... script in alphabetical order: fixed before anything was trained
Arrays = dict[str, np.ndarray]


def read(folder: str | None) -> Arrays:
    """All images of the 100 scripts; the folder is of their file, None: the usual one."""
    file = archive.FILES["noto-scripts"]
    return archive.read(Path(folder or file.parent) / file.name)


def split(arrays: Arrays, held_out: bool, shots: int | None = None, seed: int = 0) -> InMemory:
    """The ten scripts to fine-tune on, or the others to pretrain on, labelled 0, 1, ... in their order.

    Args:
        arrays: what :func:`read` gives.
        held_out: whether the ten are wanted.
        shots: training images of each; None: all.
        seed: of their choice.

    Raises:
        ValueError: ``shots`` is below 1.
    """
    names = arrays["scripts"].tolist()
    ten = set(names[HELD_OUT])
    kept = [number for number, name in enumerate(names) if (name in ten) == held_out]
    relabelled = torch.full((len(names),), -1)
    relabelled[kept] = torch.arange(len(kept))
    parts = {}
    for part in PARTS:
        images, labels = torch.from_numpy(arrays[f"{part}_images"]), relabelled[arrays[f"{part}_labels"]]
        parts[part] = (images[labels >= 0].unsqueeze(1), labels[labels >= 0])
    if shots is not None:
        parts["train"] = few(*parts["train"], shots, seed)
    return InMemory(NAME, [names[number] for number in kept], parts, datasets.AUGMENTATIONS[NAME])
