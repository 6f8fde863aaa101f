"""Two processes over gloo: ranks stay bit-identical and equal one process on the joint batch."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batch_norm_net, batches, mlp, on_two_ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
STEPS = 8
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def optimize(variant, model, base=None):
    base = base or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if variant == "dcl":
        return DCLOptimizer(base, model, weight=1.0)
    labels = {"num_classes": CLASSES} if variant == "dcp given" else {}
    return DCPOptimizer(base, model, weight=1.0, alpha=0.6, **labels)


def snapshot(model, optimizer):
    """The model and what the forecaster has learned; each rank reads the loss scale of its own rows, with rounding."""
    own = optimizer.state_dict()[f"dcl_optim.{type(optimizer).__name__}"]
    return copy.deepcopy({"model": model.state_dict(), "steps": own["steps"], "forecaster": own["forecaster"]})


def halves(x, y, rank):
    """A class is absent on one rank: the reduction has to be one and the same collective on both."""
    half = torch.argsort(y, stable=True).chunk(2)[rank]
    return x[half], y[half]


def train_rank(rank, parallel, optimizer, criterion, data, accumulate=1, given=False):
    """The last micro-batch synchronises, those before it do not, as DDP's documentation has it."""
    for x, y in data:
        optimizer.zero_grad()
        parts = list(zip(*(t.chunk(accumulate) for t in halves(x, y, rank)), strict=True))
        for index, (part, labels) in enumerate(parts):
            last = index == accumulate - 1
            if given:
                optimizer.set_targets(labels)
            with contextlib.nullcontext() if last else parallel.no_sync():
                (criterion(parallel(part), labels) / accumulate).backward()
        optimizer.step()


CASES = [(v, order, a) for v in ("dcl", "dcp") for order in ("wrapped before", "wrapped after") for a in (1, 2)]


def worker(rank: int, folder: Path) -> None:
    for case in CASES:
        torch.save(trained_on_rank(rank, *case), folder / f"{case} {rank}.pt")
        if case[0] == "dcp":
            assert_same(trained_on_rank(rank, *case), trained_on_rank(rank, "dcp given", *case[1:]), **CLOSE)
    torch.save(branch_trained_on_rank(rank), folder / f"branch {rank}.pt")


def trained_on_rank(rank: int, variant: str, order: str, accumulate: int):
    model = mlp(seed=10 * rank)  # seeded differently: rank 0's weights have to win
    criterion = nn.CrossEntropyLoss()
    if order == "wrapped before":
        optimizer = optimize(variant, model)
        parallel = DistributedDataParallel(model)
    else:
        parallel = DistributedDataParallel(model)
        optimizer = optimize(variant, parallel)
    train_rank(rank, parallel, optimizer, criterion, batches(STEPS), accumulate, variant == "dcp given")
    return snapshot(model, optimizer)


def trained_alone(variant, steps=STEPS):
    model, criterion = mlp(seed=0), nn.CrossEntropyLoss()
    optimizer = optimize(variant, model)
    for x, y in batches(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process_on_the_joint_batch(case, ranks: Path):
    first, second = (torch.load(ranks / f"{case} {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    assert_same(first, trained_alone(case[0]), **CLOSE)


class Branches(nn.Module):
    """Each call uses one of two layers, so that the other one has no gradient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(seed=seed + i) for i in range(2))

    def forward(self, x, which):
        return self.layers[which](x)


def branch_trained_on_rank(rank: int):
    model, criterion = Branches(seed=10 * rank), nn.CrossEntropyLoss()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimize("dcl", parallel)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        criterion(parallel(x.chunk(2)[rank], rank), y.chunk(2)[rank]).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def test_ranks_that_use_other_layers_have_one_companion(ranks: Path):
    model, criterion = Branches(), nn.CrossEntropyLoss()
    optimizer = optimize("dcl", model)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        for which, (part, labels) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            (criterion(model(part, which), labels) / 2).backward()
        optimizer.step()
    for rank in (0, 1):
        trained = torch.load(ranks / f"branch {rank}.pt", weights_only=True)
        assert_same(trained, snapshot(model, optimizer), **CLOSE)


def resuming_worker(rank: int, folder: Path) -> None:
    for variant in ("dcl", "dcp"):
        resume_on_rank(rank, folder / f"{variant}.pt", variant)


def resume_on_rank(rank: int, file: Path, variant: str) -> None:
    def build():
        model = mlp(seed=rank)
        parallel, criterion = DistributedDataParallel(model), nn.CrossEntropyLoss()
        return model, parallel, criterion, optimize(variant, parallel)

    model, parallel, criterion, optimizer = build()
    train_rank(rank, parallel, optimizer, criterion, batches(3))
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    dist.barrier()
    train_rank(rank, parallel, optimizer, criterion, batches(3, seed=5))
    expected = snapshot(model, optimizer)

    model, parallel, criterion, optimizer = build()
    checkpoint = torch.load(file, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train_rank(rank, parallel, optimizer, criterion, batches(3, seed=5))
    assert_same(snapshot(model, optimizer), expected)


def test_a_checkpoint_of_rank_0_resumes_all_ranks_bit_for_bit(tmp_path: Path):
    on_two_ranks(resuming_worker, tmp_path)


def zero_redundancy_worker(rank: int, folder: Path) -> None:
    for variant in ("dcl", "dcp", "dcp given"):
        model, criterion = mlp(seed=0), nn.CrossEntropyLoss()
        parallel = DistributedDataParallel(model)
        base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer = optimize(variant, parallel, base)
        train_rank(rank, parallel, optimizer, criterion, batches(STEPS), given=variant == "dcp given")
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
        base.consolidate_state_dict(to=0)
        if rank == 0:
            torch.save(snapshot(model, optimizer), folder / f"{variant}.pt")


@pytest.mark.filterwarnings("ignore:.*functional optimizers is deprecated", "ignore:.*torch.jit")
def test_zero_redundancy_optimizer_as_base(tmp_path: Path):
    on_two_ranks(zero_redundancy_worker, tmp_path)
    runs = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("dcl", "dcp", "dcp given")}
    assert_same(runs["dcp given"], runs["dcp"], **CLOSE)
    assert_same(runs["dcp"], trained_alone("dcp"), **CLOSE)
    joint = trained_alone("dcl")
    assert_same(runs["dcl"]["model"], joint["model"], **CLOSE)
    assert_same(runs["dcl"]["forecaster"]["model"], joint["forecaster"]["model"], **CLOSE)  # its optimizer is sharded


def buffers_worker(rank: int, folder: Path) -> None:
    model = batch_norm_net(seed=rank)
    model[1].running_mean.fill_(rank + 1.0)  # as ranks have it that loaded different statistics
    optimizer = optimize("dcl", model, None)
    companion = optimizer.companion  # made now, while each rank has its own model
    parallel = DistributedDataParallel(model)
    model[1].eval()  # nothing but the start moves them
    train_rank(rank, parallel, optimizer, nn.CrossEntropyLoss(), batches(2))
    torch.save(companion.state_dict(), folder / f"{rank}.pt")


def test_the_companions_start_from_rank_0s_weights_and_buffers(tmp_path: Path):
    on_two_ranks(buffers_worker, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    assert_same(first["1.running_mean"], torch.ones(12, dtype=torch.float64))


def synchronised_batch_norm_worker(rank: int, folder: Path) -> None:
    group = dist.new_group([0, 1])
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(body, process_group=group)
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, weight=1.0)
    twin = optimizer.companion[1]
    assert isinstance(twin, nn.SyncBatchNorm)
    assert twin is not model[1]
    assert twin.process_group is group


def test_the_companion_keeps_synchronised_batch_norm_and_its_group(tmp_path: Path):
    """Only its structure: torch runs synchronised batch norm on accelerators alone."""
    on_two_ranks(synchronised_batch_norm_worker, tmp_path)
