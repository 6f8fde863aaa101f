"""The ranks that train one model together, and the few collectives that a forecaster needs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcl_optim import _torch


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and what it wraps, from the outside in: DistributedDataParallel, DataParallel, compiled modules."""
    inner: nn.Module | None = model
    while isinstance(inner, nn.Module):
        yield inner
        is_parallel = isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        inner = dict(inner.named_children()).get("module" if is_parallel else "_orig_mod")  # of torch.compile


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside its wrappers."""
    *_, own = layers(model)
    return own


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is one over all ranks, each of which holds its part."""
    sharding: Any = sys.modules.get("torch.distributed.tensor")  # imported once something is sharded
    return sharding is not None and isinstance(tensor, sharding.DTensor)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors as they are, and of sharded ones this rank's part."""
    found: list[Any] = list(tensors)
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in found] if _any_sharded(found) else found


def refuse_flat_shards(model: nn.Module) -> None:
    """Raise ValueError for a model whose parameters FullyShardedDataParallel keeps in flat shards."""
    if any(isinstance(module, _fully_sharded()) for module in model.modules()):
        raise ValueError(
            "model is sharded by FullyShardedDataParallel, which no companion can follow; shard it by fully_shard, or "
            "take DCPOptimizer"
        )


def _fully_sharded() -> tuple[type[nn.Module], ...]:
    found = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return () if found is None else (found,)


class DataParallelGroup:
    """The ranks that train one model; without a group every collective does nothing.

    ``"auto"`` is the group of a DistributedDataParallel around the model, now or later, or all ranks if it is sharded.
    """

    def __init__(self, model: nn.Module, process_group: Any) -> None:
        is_auto = isinstance(process_group, str) and process_group == "auto"
        is_group = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
        if not (is_auto or is_group or process_group is None):
            raise TypeError(f"process_group={process_group!r} must be 'auto', a torch.distributed ProcessGroup or None")
        self._model = model
        self._given = process_group
        self._group: Any = process_group if is_group else None
        self._has_looked = False
        self.size = process_group.size() if is_group else 1
        self.find()

    def find(self) -> None:
        """Look for the model's group, now and at each forward of the model; one that was found stays."""
        if self._group is None and self._given is not None and dist.is_available() and dist.is_initialized():
            # Later only for what may have come since.
            self._group = _group_of(_torch.running_ddp()) if self._has_looked else _group_of_model(self._model)
            self._has_looked = True
            self.size = 1 if self._group is None else dist.get_world_size(self._group)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first one's values, in place; sharded tensors are left."""
        if self.size > 1:
            for tensor in _whole(tensors):
                dist.broadcast(tensor, src=dist.get_global_rank(self._group, 0), group=self._group)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def average(self, tensors: list[Tensor]) -> None:
        """Mean over the ranks, in place; sharded gradients, which their shards' owner has averaged, are left."""
        if self.size > 1:
            for together in _by_dtype(_whole(tensors)):
                flat = _torch.flattened(together)  # one reduction, not one for each tensor
                dist.all_reduce(flat, group=self._group)
                torch._foreach_copy_(together, _torch.unflattened(flat.div_(self.size), together))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelGroup:
        return DataParallelGroup(copy.deepcopy(self._model, memo), self._given)  # which looks for its own model's group

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None and not isinstance(self._given, str):
            raise TypeError("process_group= cannot be pickled, nor this optimizer with it; save its state_dict()")
        return self.__dict__ | {"_group": None, "_has_looked": False, "size": 1}


def _group_of_model(model: nn.Module) -> Any:
    for module in (*layers(model), _torch.running_ddp()):
        group = _group_of(module)
        if group is not None:
            return group
    return dist.group.WORLD if _any_sharded([*model.parameters(), *model.buffers()]) else None


def _group_of(module: nn.Module | None) -> Any:
    """The group of a module that wraps another for data parallelism; None for any other."""
    is_wrapper = isinstance(module, (nn.parallel.DistributedDataParallel, *_fully_sharded()))
    return getattr(module, "process_group", None) if is_wrapper else None


def _any_sharded(tensors: list[Tensor]) -> bool:
    """Whether some are, with no work in Python that grows with their number."""
    return any(map(is_sharded, dict(zip(map(type, tensors), tensors, strict=True)).values()))


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    tensors = list(tensors)
    return [tensor for tensor in tensors if not is_sharded(tensor)] if _any_sharded(tensors) else tensors


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype each, in the same order on every rank."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return [found[dtype] for dtype in sorted(found, key=str)]
