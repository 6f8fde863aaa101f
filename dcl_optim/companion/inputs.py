"""The companion's inputs: the model's arguments out of their graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim._torch import frames_of, saved_tensors_hooks, versions_of
from dcl_optim._tree import map_tensors, tensors_of

_requires_grad = attrgetter("requires_grad")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None)})  # what holds nothing that could change


class InputCapture:
    """Keeps the model's arguments, detached, in other containers; clones if the first forward writes to them."""

    def __init__(self) -> None:
        self._writes: bool | None = None  # whether the model's forward pass writes to its inputs; None until the first
        self._call: Arguments | None = None
        self._arguments: Arguments
        self._tensors: Sequence[Tensor]

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of the forward pass that begins."""
        self._call = self._arguments = args, kwargs
        is_plain = not kwargs and {Tensor}.issuperset(map(type, args))
        self._tensors = args if is_plain else tensors_of(self._call)
        self._versions = versions_of(self._tensors)
        self._clones: Arguments | None = None if self._writes is False else map_tensors(_clone, self._call)
        if any(map(_requires_grad, self._tensors)) or not PLAIN.issuperset(map(type, chain(args, kwargs.values()))):
            self._arguments = map_tensors(_detach, self._call)

    def after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments as the model got them."""
        call, self._call = self._call, None
        if call is None or not (call[0] is args or _are_same(call, args, kwargs)):
            return map_tensors(_detach, (args, kwargs))  # a later pre-hook has put others in their place
        writes = versions_of(self._tensors) != self._versions
        if writes and self._clones is None:
            raise RuntimeError(
                "the model's forward pass has written to one of its inputs in place, which dcl_optim clones if the "
                "first one did: begin forward with x = x.clone(), or write nn.ReLU(inplace=False)"
            )
        arguments = self._clones if writes and self._clones is not None else self._arguments
        self._writes = writes or bool(self._writes)
        self._tensors, self._clones, self._arguments = (), None, ((), {})
        return arguments

    def __getstate__(self) -> dict[str, Any]:
        return {"_writes": self._writes, "_call": None}


def _are_same(call: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != len(call[0]) or kwargs.keys() != call[1].keys():
        return False
    return all(map(is_, chain(args, kwargs.values()), chain(call[0], call[1].values())))


def _detach(tensor: Tensor) -> Tensor:
    # Still in need of a gradient: a reentrant checkpoint inside the companion would skip its block without one.
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _clone(tensor: Tensor) -> Tensor:
    # No leaf where it needs a gradient, which the companion's forward could not write to.
    return _detach(tensor).clone()


def outside_checkpoints() -> AbstractContextManager[Any]:
    """Keep what the companion saves out of a non-reentrant checkpoint, whose recomputation does not save it again."""
    if saved_tensors_hooks() is not None and any(frames_of("torch.utils.checkpoint")):
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return nullcontext()
