"""overlap=True on two processes over gloo: the serial run bit for bit, or refused where it would hang."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dcl_optim import DCLOptimizer
from tests.helpers import (
    CLASSES,
    FEATURES,
    SHARDS_ON_CPU,
    assert_same,
    batch_norm_net,
    batches,
    mlp,
    one,
    snapshot,
    threads_of_forwards,
    wrap,
)
from tests.test_distributed import train_rank

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
CASES = [("wrapped before", 2), ("wrapped after", 1)]


def trained(rank: int, order: str, accumulate: int, overlap: bool):
    torch.manual_seed(10 * rank)  # rank 0's weights have to win
    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES)).double()
    parallel = DistributedDataParallel(model) if order == "wrapped after" else None
    optimizer = DCLOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), parallel or model, overlap=overlap, weight=1.0
    )
    parallel = parallel or DistributedDataParallel(model)
    torch.manual_seed(20 + rank)
    with threads_of_forwards() as names:
        train_rank(rank, parallel, optimizer, nn.CrossEntropyLoss(), batches(8, size=24), accumulate)
    assert any(name.startswith("dcl_optim") for name in names) == overlap
    return snapshot(optimizer) | {"model": copy.deepcopy(model.state_dict())}


def worker(rank: int, folder: Path) -> None:
    for order, accumulate in CASES:
        found, expected = (trained(rank, order, accumulate, overlap) for overlap in (True, False))
        assert_same(found, expected)
        parameters = {name: tensor for name, tensor in found["model"].items() if "running" not in name}
        torch.save(parameters, folder / f"{order} {accumulate} {rank}.pt")
    refuse_what_talks_to_other_processes()


def refuse_what_talks_to_other_processes() -> None:
    message = r"overlap=True.*SyncBatchNorm, sharded parameters.*overlap=False"
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm_net())
    optimizer = wrap(synchronised, overlap=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            synchronised(one()[0])

    if not SHARDS_ON_CPU:
        return
    mesh = init_device_mesh("cpu", (2,))
    model, twin = (fully_shard(mlp(), mesh=mesh) for _ in range(2))
    optimizer = wrap(model, companion=twin, overlap=True)
    with pytest.raises(RuntimeError, match=message):
        model(one()[0])
    optimizer.detach()


@pytest.mark.parametrize(("order", "accumulate"), CASES)
def test_overlap_equals_serial_and_both_ranks_each_other(order, accumulate, ranks):
    first, second = (torch.load(ranks / f"{order} {accumulate} {rank}.pt") for rank in (0, 1))
    assert_same(first, second)
