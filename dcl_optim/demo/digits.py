"""scikit-learn's digits in three fixed splits, and a small network for them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

CLASSES = 10
TEST_SIZE = 597
VALIDATION_SIZE = 400
POOL_SIZE = 800

Images = tuple[Tensor, Tensor]


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """Shuffle samples so that every prefix has the classes in the whole's proportions, as far as it can.

    Args:
        labels: integer classes, (N,).
        seed: of the shuffle.

    Returns:
        The samples' indices, (N,).
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    places = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        members = shuffled[labels[shuffled] == label]
        places[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    return shuffled[places[shuffled].argsort(stable=True)]


def load_digits() -> tuple[Images, Images, Images]:
    """Load the 1797 digits as (N, 1, 8, 8), split into training pool, validation and test, always the same way."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.3
    labels = torch.tensor(digits.target, dtype=torch.long)
    test, validation, pool = stratified_order(labels, seed=0).split([TEST_SIZE, VALIDATION_SIZE, POOL_SIZE])
    return (images[pool], labels[pool]), (images[validation], labels[validation]), (images[test], labels[test])


def make_model() -> nn.Module:
    """Build a network of four convolutions for images of shape (1, 8, 8)."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((1, 16, 16, 32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 32, CLASSES))
