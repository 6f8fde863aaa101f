"""Parts of a data set that have all classes in proportion."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = ("train", "validation", "test")


def check_part(part: str) -> str:
    """Return a known part's name; ValueError for others."""
    if part not in PARTS:
        raise ValueError(f"part={part!r} is unknown; choose one of {', '.join(PARTS)}")
    return part


def stratified(labels: Tensor, count: int, seed: int) -> Tensor:
    """Numbers of ``count`` random samples, in order, with each class in proportion up to one sample.

    A smaller count gives a part of what a larger one gives, with the same seed.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[torch.argsort(labels[order], stable=True)]
    sizes = torch.bincount(labels)
    first = (sizes.cumsum(0) - sizes)[labels[by_class]]
    rank = torch.arange(len(labels)) - first
    quantile = (rank.double() + 0.5) / sizes[labels[by_class]]
    return by_class[torch.argsort(quantile, stable=True)[:count]].sort().values


def others(count: int, chosen: Tensor) -> Tensor:
    """The numbers below ``count`` that are not chosen, in order."""
    kept = torch.ones(count, dtype=torch.bool)
    kept[chosen] = False
    return kept.nonzero().flatten()


def subset(labels: Tensor, train_size: int | None) -> Tensor:
    """A stratified part of the training samples, all for None, the same for every seed so that runs compare."""
    return torch.arange(len(labels)) if train_size is None else stratified(labels, _checked(train_size, len(labels)), 0)


def train_and_validation(labels: Tensor, validation: int, train_size: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Split the training samples: ``validation`` of them, by the seed, and ``train_size`` others or all the others.

    Raises:
        ValueError: there are not so many samples.
    """
    if train_size is None:
        held_out = stratified(labels, validation, seed)
        return others(len(labels), held_out), held_out
    train = stratified(labels, _checked(train_size, len(labels) - validation), 0)
    rest = others(len(labels), train)
    return train, rest[stratified(labels[rest], validation, seed)]


def _checked(train_size: int, most: int) -> int:
    if not 2 <= train_size <= most:
        raise ValueError(f"train_size={train_size} must be from 2 to {most}, the training samples there are")
    return train_size
