"""Many steps of a tiny model in a process of their own, and what memory they leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import resident_peak
from dcl_optim import DCLOptimizer, DCPOptimizer

STEPS, WARM_UP = 20_000, 2_000
# A leak of the smallest tensor in each of 18,000 steps holds about 6 MiB more.
MOST_BYTES = 2 * 2**20


def step_of(variant: str) -> Callable[[], object]:
    """A training step of a tiny model; ``leak...`` are steps that lose a tensor each time, in Python or in C++.

    ``..., term``: the penalty is a term of a loss that cannot be read.
    """
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 3), torch.randn(4, 2), torch.tensor([0, 1, 2, 1])
    criterion, lost = nn.CrossEntropyLoss(), []
    chain = [torch.zeros((), requires_grad=True)]
    if variant == "leak":
        return lambda: lost.append(torch.zeros(()))
    if variant == "leak in the graph":
        return lambda: chain.append(chain.pop() + 1)
    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer: Any = (DCLOptimizer if "dcl" in variant else DCPOptimizer)(base, model)
    term = {"dcl, term": lambda z: optimizer.penalty(z), "dcp, term": lambda z: optimizer.penalty(z, y)}.get(variant)

    def step() -> None:
        optimizer.zero_grad()
        z = model(x)
        loss = criterion(z, y) if term is None else z.square().mean() + term(z)
        loss.backward()
        optimizer.step()

    return step


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def growth(variant: str, result: Any) -> None:
    """Send the bytes and the tensors that the steps after the warm-up have added."""
    torch.set_num_threads(1)
    gc.freeze()  # to list what was there before would take memory, which a leak could then hide in
    step = step_of(variant)
    for _ in range(WARM_UP):
        step()
    before = live_tensors(), resident_peak()
    for _ in range(STEPS - WARM_UP):
        step()
    peak = resident_peak()
    after = live_tensors(), peak
    result.send((after[0] - before[0], after[1] - before[1]))
