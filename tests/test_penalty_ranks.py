"""``optimizer.penalty(...)`` on two processes over gloo: DistributedDataParallel and FSDP2 equal one process."""

from __future__ import annotations

import contextlib
import copy
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

from tests.by_hand import VARIANTS, learned, term_of, wrap
from tests.helpers import SHARDS_ON_CPU, assert_same, batches, mlp

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
STEPS = 6


def wrapped_before(variant: str, rank: int) -> tuple[nn.Module, Any]:
    """The wrapped model's output is not the one that the script gets."""
    model = mlp(seed=10 * rank)
    optimizer = wrap(variant, model)
    return DistributedDataParallel(model, find_unused_parameters=True), optimizer


def wrapped_after(variant: str, rank: int) -> tuple[nn.Module, Any]:
    parallel = DistributedDataParallel(mlp(seed=10 * rank))
    return parallel, wrap(variant, parallel)


def sharded(variant: str, rank: int) -> tuple[nn.Module, Any]:
    """Whole, so that no parameter is a shard while the model runs; the companion is sharded as the model is."""
    mesh = init_device_mesh("cpu", (2,))
    model, twin = (fully_shard(mlp(), mesh=mesh) for _ in range(2))
    return model, wrap(variant, model, **{"companion": twin} if variant == "dcl" else {})


def sharded_by_layers(variant: str, rank: int) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model, twin = mlp(), mlp()
    for network in (model, twin):
        fully_shard(network[0], mesh=mesh)
        fully_shard(network, mesh=mesh)
    return model, wrap(variant, model, **{"companion": twin} if variant == "dcl" else {})


CELLS = [(wrapped_before, 2), (wrapped_after, 1)] + [(sharded, 1), (sharded_by_layers, 1)] * SHARDS_ON_CPU

def worker(rank: int, folder: Path) -> None:
    for variant in VARIANTS:
        for cell, parts in CELLS:
            call, optimizer = cell(variant, rank)
            term = term_of(optimizer)
            for x, y in batches(STEPS):
                rows = torch.argsort(y, stable=True).chunk(2)[rank]  # a class is absent on one rank
                optimizer.zero_grad()
                for index, part in enumerate(rows.chunk(parts)):
                    last = index == parts - 1
                    with contextlib.nullcontext() if last else call.no_sync():
                        z = call(x[part])
                        ((F.multi_margin_loss(z, y[part]) + term(z, y[part])) / parts).backward()
                optimizer.step()
            own = getattr(call, "module", call)
            state = copy.deepcopy([dict(own.state_dict()), learned(optimizer)])
            state = [{name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in part.items()} for part in state]
            torch.save(state, folder / f"{variant} {cell.__name__} {rank}.pt")


@pytest.mark.parametrize("cell", [cell for cell, _ in CELLS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_one_process_on_the_joint_batch(variant: str, cell: Any, ranks: Path) -> None:
    first, second = (torch.load(ranks / f"{variant} {cell.__name__} {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    alone = wrap(variant, mlp())
    for x, y in batches(STEPS):
        alone.zero_grad()
        z = alone.model(x)
        (F.multi_margin_loss(z, y) + term_of(alone)(z, y)).backward()
        alone.step()
    assert_same(first, [dict(alone.model.state_dict()), learned(alone)], rtol=1e-12, atol=1e-12)
