"""A small problem that the tests of DCP share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim import DCPOptimizer

CLASSES, FEATURES = 12, 5


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES)).to(dtype)


def wrap(model: nn.Module, lr: float = 0.1, **options: Any) -> DCPOptimizer:
    return DCPOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        model,
        CLASSES,
        **{"weight": 1.0, "alpha": 0.6} | options,
    )


def batches(
    steps: int, size: int = 8, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Tensor, Tensor]]:
    """Small enough for classes to be absent, and to come for the first time late."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        known = 4 + step % (CLASSES - 3)
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        yield x, torch.randint(known, (size,), generator=generator)


def train(model: nn.Module, optimizer: DCPOptimizer, data: Any, criterion: nn.Module) -> None:
    for x, y in data:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
