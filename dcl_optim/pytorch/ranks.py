"""The ranks that train one model together, and the few collectives that a forecaster needs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from itertools import filterfalse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcl_optim.pytorch import internals

SEVERAL_RANKS = (
    "torch.distributed has {} ranks, but the model was found neither in DistributedDataParallel nor as one that "
    "fully_shard got: each rank has prototypes or a companion of its batches alone.\n"
    "  Fix: if the ranks train one model, as with DeepSpeed or where the script averages the gradients, pass "
    "process_group=torch.distributed.group.WORLD; if each trains another one, or has all rows (tensor parallel), "
    "process_group=None"
)

SHARDED_LOGITS = (
    "the logits are a DTensor with {}, of which a rank has a part or a view only.\n"
    "  Fix: have the last layer give them whole, output_layouts=Replicate() with use_local_output=True, and leave out "
    "loss_parallel; or with DCPOptimizer add their penalty to the loss, loss.full_tensor() + "
    "optimizer.penalty(logits.full_tensor(), labels)"
)


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


def any_sharded(tensors: list[Tensor]) -> bool:
    """Whether some tensors are over all ranks, each of which holds its part: DTensor alone lies on a mesh."""
    return any(hasattr(kind, "device_mesh") for kind in set(map(type, tensors)))  # nothing for each tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is over all ranks, each of which holds its part."""
    return any_sharded([tensor])


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors as they are, and of sharded ones this rank's part."""
    found: list[Any] = list(tensors)
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in found] if any_sharded(found) else found


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = list(tensors)
    return list(filterfalse(is_sharded, found)) if any_sharded(found) else found


def sum_of_norms(tensors: list[Tensor], norm_type: float = 2.0) -> float:
    """The sum of a norm of all whole tensors and of those of each mesh, the same on all ranks. Synchronizes."""
    by_mesh: dict[Any, list[Tensor]] = {}  # torch takes those of two meshes, or sharded ones beside others, in no call
    for tensor in tensors:
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    total = 0.0
    for together in by_mesh.values():
        norm: Any = torch.nn.utils.get_total_norm(together, norm_type)
        total += (norm.full_tensor() if is_sharded(norm) else norm).item()
    return total


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

    ``"auto"`` is the group of a DistributedDataParallel around the model, now or later, or the ranks of the mesh over
    which its parameters lie. Of these some may have the same rows (tensor parallelism), which changes no mean.

    Attributes:
        size: how many ranks train the model.
        rank: the number of this one among them, from 0.
    """

    def __init__(self, model: nn.Module, process_group: Any) -> None:
        is_group = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
        if not is_group and process_group not in ("auto", None):
            raise TypeError(f"process_group={process_group!r} must be 'auto', a torch.distributed ProcessGroup or None")
        self._model = model
        self._given = process_group
        self._said: set[str] = set()
        self._groups: list[Any] = []
        self._has_looked = False
        self.size = 1
        self.rank = 0
        self.find()

    def find(self) -> None:
        """Look for the model's group, now and at each forward pass of the model; one that was found stays."""
        if not self._groups and self._given is not None and dist.is_available() and dist.is_initialized():
            self._groups = [self._given] if self._given != "auto" else self._look()
            self._has_looked = True
            for group in self._groups:
                self.size *= group.size()
                self.rank = self.rank * group.size() + group.rank()

    def _look(self) -> list[Any]:
        wrappers = (*layers(self._model), internals.running_ddp())
        found = list(filter(None, map(_group_of, wrappers)))[:1]
        return found if found or self._has_looked else _groups_of_mesh(self._model)

    def warn_of_ranks(self) -> None:
        """Warn once if there are several ranks, and no group was found: called when a step has been taken."""
        if self._has_looked and not self._groups and dist.is_initialized() and dist.get_world_size() > 1:
            internals.warn_once(self._said, SEVERAL_RANKS.format(dist.get_world_size()))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first one's values, in place; sharded tensors are left."""
        if self.size > 1:
            for tensor in _whole(tensors):
                for group in self._groups:
                    dist.broadcast(tensor, group=group, group_src=0)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.size > 1:
            for group in self._groups:
                dist.all_reduce(tensor, group=group)

    def largest(self, number: int) -> int:
        """The largest number of the ranks."""
        for group in self._groups:
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, number, group=group)
            number = max(found)
        return number

    def average(self, tensors: list[Tensor]) -> None:
        """Mean over the ranks, in place; sharded gradients, which their shards' owner has averaged, are left."""
        together = _whole(tensors)
        if together:
            flat = torch.cat(list(map(Tensor.flatten, together)))  # one reduction, not one for each tensor
            self.all_reduce_sum(flat)
            parts = flat.div_(self.size).split(list(map(Tensor.numel, together)))
            torch._foreach_copy_(together, list(map(Tensor.view_as, parts, together)))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelGroup:
        copied = copy.copy(self)  # a process group has no copies
        copied._model = copy.deepcopy(self._model, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_groups": [], "_has_looked": False, "size": 1, "rank": 0}


def _groups_of_mesh(model: nn.Module) -> list[Any]:
    """One group for each dimension of the mesh over which the first sharded parameter lies; none without one."""
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    return [] if sharded is None else sharded.device_mesh.get_all_groups()


def _group_of(module: nn.Module | None) -> Any:
    """The group of a module that wraps another for data parallelism; None for any other."""
    is_wrapper = isinstance(module, (nn.parallel.DistributedDataParallel, *_fully_sharded()))
    return getattr(module, "process_group", None) if is_wrapper else None
