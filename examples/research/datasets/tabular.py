"""Rows of numbers of two to ten classes: scikit-learn's tables, and Gaussian classes that overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.research.datasets.base import InMemory
from examples.research.datasets.splits import PARTS, others, stratified

LOADERS = {
    "breast-cancer": "load_breast_cancer",
    "wine": "load_wine",
    "iris": "load_iris",
    "digits-table": "load_digits",
}
GAUSSIANS = "gaussians"
NAMES = (*LOADERS, GAUSSIANS)
VALIDATION = 0.2  # of the rows
TEST = 0.3


def table(name: str) -> InMemory:
    """Half of the rows for training, a fifth for validation and three tenths for the test, always the same.

    Each feature is standardized by the training rows; digits, whose pixels have one scale, are as one feature.

    Args:
        name: one of NAMES.
    """
    x, y = gaussians() if name == GAUSSIANS else _of_scikit_learn(name)
    x = x[:, None, None, :] if name == "digits-table" else x[:, :, None, None]
    test = stratified(y, round(TEST * len(y)), seed=0)
    rest = others(len(y), test)
    held_out = stratified(y[rest], round(VALIDATION * len(y)), seed=0)
    validation = rest[held_out]
    train = rest[others(len(rest), held_out)]
    parts = {part: (x[rows], y[rows]) for part, rows in zip(PARTS, (train, validation, test), strict=True)}
    return InMemory(name, [str(label) for label in range(int(y.max()) + 1)], parts)


def _of_scikit_learn(name: str) -> tuple[Tensor, Tensor]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(f"{name} is in scikit-learn: pip install scikit-learn") from error
    found = getattr(datasets, LOADERS[name])()
    return torch.tensor(found.data).float(), torch.tensor(found.target).long()


def gaussians(classes: int = 5, features: int = 10, of_each: int = 1000) -> tuple[Tensor, Tensor]:
    """Rows with standard deviation 1 about means with standard deviation 0.5: two means are 2.2 apart on average.

    Returns:
        Rows (classes * of_each, features) and their classes.
    """
    generator = torch.Generator().manual_seed(0)
    means = 0.5 * torch.randn(classes, features, generator=generator)
    y = torch.arange(classes).repeat(of_each)
    return means[y] + torch.randn(len(y), features, generator=generator), y
