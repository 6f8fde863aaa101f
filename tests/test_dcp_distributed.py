"""Prototypes over two processes: the same bits on both, and one process's on the joint batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.dcp_forms import CLASSES, batches, network, wrap
from tests.helpers import assert_same

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
STEPS = 12
CASES = [(size, parts) for size in (8, 40) for parts in ("equal", "uneven")]  # fewer rows than classes, and more


def part_of(rank: int, x, y, parts: str):
    """By label, so that most classes are absent on one rank; half of the batch each, or a quarter and the rest."""
    order = torch.argsort(y, stable=True)
    cut = len(y) // (2 if parts == "equal" else 4)
    rows = (order[:cut], order[cut:])[rank]
    return x[rows], y[rows]


def prepare(parts: str):
    """Uneven parts train without the penalty, whose mean within each rank weighs its rows otherwise than the batch."""
    if parts == "equal":
        return network(), nn.CrossEntropyLoss(), 1.0
    return network(), nn.CrossEntropyLoss(reduction="sum", ignore_index=2), 0.0


def snapshot(model, optimizer):
    return {"model": model.state_dict(), "own": optimizer.prototypes, "seen": optimizer.forecaster.seen}


def trained_on_rank(rank: int, size: int, parts: str):
    model, criterion, weight = prepare(parts)
    parallel = DistributedDataParallel(model)
    optimizer = wrap(model, weight=weight)
    for x, y in batches(STEPS, size=size):
        optimizer.zero_grad()
        inputs, labels = part_of(rank, x, y, parts)
        loss = criterion(parallel(inputs), labels)
        (loss if parts == "equal" else loss * 2 / size).backward()  # DDP takes the mean over the ranks
        optimizer.step()
    return snapshot(model, optimizer)


def trained_alone(size: int, parts: str):
    model, criterion, weight = prepare(parts)
    optimizer = wrap(model, weight=weight)
    for x, y in batches(STEPS, size=size):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        (loss if parts == "equal" else loss / size).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def worker(rank: int, folder: Path) -> None:
    for case in CASES:
        torch.save(trained_on_rank(rank, *case), folder / f"{case} {rank}.pt")
    torch.save(trained_in_parts(rank), folder / f"parts {rank}.pt")


def trained_in_parts(rank: int):
    """One rank has its rows in three forwards, the other in one, and one of theirs is soft labels."""
    model, criterion, _ = prepare("equal")
    optimizer = wrap(model, lr=0.0, process_group=dist.group.WORLD)  # no DistributedDataParallel
    for x, y in batches(4):
        optimizer.zero_grad()
        z, labels = part_of(rank, x, y, "equal")
        for rows in torch.arange(4).split(4 if rank else 2):
            soft = nn.functional.one_hot(labels[rows], CLASSES).double() if rank else labels[rows]
            optimizer.set_targets(soft)
            criterion(model(z[rows]), soft).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def both(ranks: Path, name: str):
    return [torch.load(ranks / f"{name} {rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ranks_hold_what_one_process_has_on_the_joint_batch(case, ranks: Path):
    first, second = both(ranks, str(case))
    assert_same(first, second)
    assert_same(first, trained_alone(*case), rtol=1e-9, atol=1e-10)
    assert first["seen"].sum() > CLASSES // 2


def test_ranks_may_differ_in_the_number_of_their_forwards_and_the_kind_of_their_labels(ranks: Path):
    first, second = both(ranks, "parts")
    assert_same(first, second)
    model, criterion, _ = prepare("equal")
    optimizer = wrap(model, lr=0.0)
    for x, y in batches(4):
        criterion(model(x), y).backward()
        optimizer.step()
    assert_same(first, snapshot(model, optimizer), rtol=1e-9, atol=1e-10)
