"""The few collectives the forecasters need; each does nothing outside torch.distributed or with one process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together, 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every process rank 0's values, in place; sharded tensors, which are one over all processes, are left."""
    if world_size() > 1:
        for tensor in _whole(tensors):
            dist.broadcast(tensor, src=0)


def add_up(tensors: Iterable[Tensor]) -> None:
    """Sum over the processes, in place."""
    if world_size() > 1:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def average(tensors: list[Tensor]) -> None:
    """Mean over the processes, in place; sharded gradients, which their shards' owner has averaged, are left."""
    if world_size() > 1:
        whole = _whole(tensors)
        add_up(whole)
        for tensor in whole:
            tensor.div_(world_size())


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    sharding: Any = sys.modules.get("torch.distributed.tensor")  # imported once something is sharded
    return [tensor for tensor in tensors if sharding is None or not isinstance(tensor, sharding.DTensor)]
