"""Two processes over gloo: ranks stay bit-identical and equal one process on the joint batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
STEPS = 8


def optimize(variant, model, criterion):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if variant == "dcl":
        return DCLOptimizer(base, model)
    return DCPOptimizer(base, model, CLASSES, criterion=criterion)


def snapshot(model, optimizer):
    state = optimizer.state_dict()
    return copy.deepcopy({"model": model.state_dict(), "own": state[f"dcl_optim.{type(optimizer).__name__}"]})


def worker(rank: int, folder: str, variant: str, order: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = mlp(seed=10 * rank)  # seeded differently: rank 0's weights have to win
    criterion = nn.CrossEntropyLoss()
    if order == "wrapped before":
        optimizer = optimize(variant, model, criterion)
        parallel = nn.parallel.DistributedDataParallel(model)
    else:
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = optimize(variant, parallel, criterion)
    for x, y in batches(STEPS):
        # A class is absent on one rank: the reduction has to be one and the same collective on both.
        half = torch.argsort(y, stable=True).chunk(2)[rank]
        optimizer.zero_grad()
        criterion(parallel(x[half]), y[half]).backward()
        optimizer.step()
    torch.save(snapshot(model, optimizer), f"{folder}/{rank}.pt")
    dist.barrier()  # a rank that leaves early can break the other's last reduction
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["wrapped before", "wrapped after"])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_two_ranks_equal_one_process_on_the_joint_batch(variant, order, tmp_path: Path):
    mp.spawn(worker, (str(tmp_path), variant, order), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)

    model, criterion = mlp(seed=0), nn.CrossEntropyLoss()
    optimizer = optimize(variant, model, criterion)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    joint = snapshot(model, optimizer)
    assert_same(first["model"], joint["model"], rtol=1e-9, atol=1e-10)
    assert_same(first["own"], joint["own"], rtol=1e-9, atol=1e-10)
