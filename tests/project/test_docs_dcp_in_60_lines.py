"""docs/dcp-in-60-lines.md: the code on the page trains as DCPOptimizer does, in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from tests.helpers import assert_same, sgd
from tests.reference import train

PAGE = (Path(__file__).parents[2] / "docs" / "dcp-in-60-lines.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FEATURES, ROWS, STEPS = 20, 80, 30
Batches = list[tuple[Tensor, Tensor]]


def network(classes: int) -> nn.Module:
    """Of logits so large that some rows of four classes are where mse is linear."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, classes)).double()
    model[2].weight.data *= 4
    return model


def batches(classes: int) -> Batches:
    """Rows around a center for each class. Each batch lacks one class, and a tenth of the rows is ignored."""
    torch.manual_seed(1)
    centers = 4 * torch.randn(classes, FEATURES, dtype=torch.float64)
    found = []
    for step in range(STEPS):
        y = torch.randint(classes - 1, (ROWS,))
        y += y >= step % classes
        x = centers[y] + 0.1 * torch.randn(ROWS, FEATURES, dtype=torch.float64)
        found.append((x, y.masked_fill(torch.rand(ROWS) < 0.1, -100)))
    return found


def by_hand(classes: int, weight: Any, data: Batches) -> tuple[nn.Module, Any]:
    """Trained by the page's code."""
    page: dict[str, Any] = {}
    exec(CODE, page)
    model, prototypes = network(classes), page["Prototypes"](classes, weight=weight).double()
    page["train"](model, sgd(model), prototypes, data)
    return model, prototypes


def wrapped(classes: int, weight: Any, data: Batches, way: str) -> tuple[nn.Module, DCPOptimizer]:
    model = network(classes)
    optimizer = DCPOptimizer(sgd(model), model, weight=weight)
    return model, train(optimizer, data, way, F.cross_entropy)


def test_the_code_has_at_most_60_lines() -> None:
    assert len(CODE.splitlines()) <= 60


@pytest.mark.parametrize(
    ("classes", "weight", "way", "tolerance"),
    [
        (4, 0.7, "line", 1e-12),
        (4, 0.7, "term", 1e-12),
        (60, "auto", "term", 1e-6),  # the optimizer's counts may be in float32
    ],
)
def test_it_trains_as_the_optimizer(classes: int, weight: Any, way: str, tolerance: float) -> None:
    """With so many classes that the automatic weight leaves its floor of 0.1."""
    data = batches(classes)
    model, prototypes = by_hand(classes, weight, data)
    expected, optimizer = wrapped(classes, weight, data, way)
    assert optimizer.logs()["weight"] > 0.2
    assert_same(model, expected, atol=tolerance)
    assert_same(prototypes.values, optimizer.prototypes, atol=tolerance)
