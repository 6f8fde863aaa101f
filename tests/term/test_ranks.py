"""``optimizer.penalty(...)`` on two processes over gloo: DistributedDataParallel and FSDP2 equal one process."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import SHARDS_ON_CPU, assert_same, batches, mlp
from tests.reference import CLOSE, VARIANTS, learned, term_of, train, wrap

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
STEPS = 6


def wrapped_before(variant: str, rank: int) -> tuple[nn.Module, Any]:
    """What the script gets is a copy of what the wrapped model returned."""
    model = mlp(seed=10 * rank)
    optimizer = wrap(variant, model)
    return DistributedDataParallel(model, find_unused_parameters=True), optimizer


def wrapped_after(variant: str, rank: int) -> tuple[nn.Module, Any]:
    parallel = DistributedDataParallel(mlp(seed=10 * rank))
    return parallel, wrap(variant, parallel)


def sharded(variant: str, rank: int, by_layers: bool = False) -> tuple[nn.Module, Any]:
    """Whole, no parameter is a shard while the model runs; the companion is sharded as the model is."""
    model, twin, mesh = mlp(), mlp(), init_device_mesh("cpu", (2,))
    for network in (model, twin):
        for part in (network[0], network) if by_layers else (network,):
            fully_shard(part, mesh=mesh)
    return model, wrap(variant, model, **{"companion": twin} if variant == "dcl" else {})


def sharded_by_layers(variant: str, rank: int) -> tuple[nn.Module, Any]:
    return sharded(variant, rank, by_layers=True)


CELLS = list(product(VARIANTS, [wrapped_before, wrapped_after] + [sharded, sharded_by_layers] * SHARDS_ON_CPU))


def worker(rank: int, folder: Path) -> None:
    for variant, cell in CELLS:
        call, optimizer = cell(variant, rank)
        halves = ((torch.argsort(y, stable=True).chunk(2)[rank], x, y) for x, y in batches(STEPS))
        train(optimizer, ((x[rows], y[rows]) for rows, x, y in halves), call=call)  # a class is absent on one rank
        own = getattr(call, "module", call).state_dict(), learned(optimizer)
        state = [{name: getattr(t, "full_tensor", t.clone)() for name, t in part.items()} for part in own]
        torch.save(state, folder / f"{variant} {cell.__name__} {rank}.pt")
    for variant in VARIANTS:
        torch.save(without_a_term_in_one_rank(variant, rank), folder / f"{variant} in some batches {rank}.pt")


def without_a_term_in_one_rank(variant: str, rank: int) -> Any:
    """A batch without labels has no term: the other rank must not wait for its share."""
    parallel, optimizer = wrapped_after(variant, rank)
    for number, (x, y) in enumerate(batches(STEPS)):
        x, y = x.chunk(2)[rank], y.chunk(2)[rank]
        optimizer.zero_grad()
        z = parallel(x)
        loss = F.cross_entropy(z, y)
        if rank == 0 or number != 2:
            loss = loss + term_of(optimizer)(z, y)
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which says that a step had no term
            optimizer.step()
    return dict(parallel.module.state_dict()), learned(optimizer), optimizer.logs()["skipped"]


@pytest.mark.parametrize(("variant", "cell"), CELLS)
def test_two_ranks_equal_one_process_on_the_joint_batch(variant: str, cell: Any, ranks: Path) -> None:
    first, second = (torch.load(ranks / f"{variant} {cell.__name__} {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    alone = train(wrap(variant, mlp()), batches(STEPS))
    assert_same(first, [dict(alone.model.state_dict()), learned(alone)], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_without_a_term_in_a_step_ends_where_the_other_does(variant: str, ranks: Path) -> None:
    first, second = (torch.load(ranks / f"{variant} in some batches {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first[:2], second[:2])
    assert (first[2], second[2]) == (0, 1)
