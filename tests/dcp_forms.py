"""What the tests of DCP's two forms share: a small problem, and a way to have either form on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dcl_optim import DCPOptimizer, table

CLASSES, FEATURES = 12, 5
FORMS = {"few": 256, "many": 0}  # what FEW_CLASSES has to be for this problem to have few classes or many


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(table, "FEW_CLASSES", FORMS[request.param])
    return request.param


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FEW_CLASSES", FORMS["many"])


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


def all_of(optimizer: DCPOptimizer) -> Tensor:
    return optimizer.prototypes_of(torch.arange(CLASSES))
