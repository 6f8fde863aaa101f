"""The few collectives the forecasters need; each does nothing outside torch.distributed or with one process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import compress, repeat
from operator import attrgetter, eq
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


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
        for together in _by_dtype(_whole(tensors)):
            flat = _flatten_dense_tensors(together)  # one reduction, not one for each tensor
            dist.all_reduce(flat)
            torch._foreach_copy_(together, _unflatten_dense_tensors(flat.div_(world_size()), together))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is one over all processes, each of which holds its part."""
    sharding: Any = sys.modules.get("torch.distributed.tensor")  # imported once something is sharded
    return sharding is not None and isinstance(tensor, sharding.DTensor)


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    tensors = list(tensors)
    if not any(map(is_sharded, dict(zip(map(type, tensors), tensors, strict=True)).values())):
        return tensors
    return [tensor for tensor in tensors if not is_sharded(tensor)]


def _by_dtype(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype each, in the same order on every process."""
    dtypes = list(map(attrgetter("dtype"), tensors))
    for dtype in sorted(set(dtypes), key=str):
        yield list(compress(tensors, map(eq, dtypes, repeat(dtype))))
