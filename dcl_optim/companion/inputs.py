"""The companion's inputs: the model's arguments out of their graph, or a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim._torch import frames_of, saved_tensors_hooks, versions_of
from dcl_optim._tree import map_tensors, named_tensors, tensors_of

_requires_grad = attrgetter("requires_grad")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


PLAIN = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None)})  # what holds nothing that could change


class InputCapture:
    """Keeps the model's arguments for the companion as the model gets them.

    Out of their graph, and in containers that the model's forward pass cannot change. In the first forward pass tensors
    are cloned, and later if that one has written to them.

    Attributes:
        cuts_rows: whether the parts of a batch are known to be rows of it.
    """

    def __init__(self) -> None:
        self._writes: bool | None = None  # whether the model's forward pass writes to its inputs; None until the first
        self.cuts_rows = False
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
        """The arguments as the model got them.

        Raises:
            RuntimeError: the model has written to them, which it had not done in its first forward pass.
        """
        call, self._call = self._call, None
        is_same = call is not None and (call[0] is args or _are_same(call, args, kwargs))
        if not is_same:  # a later pre-hook has put others in their place
            return detached((args, kwargs))
        writes = versions_of(self._tensors) != self._versions
        if writes and self._clones is None:
            raise RuntimeError(
                "the model's forward pass has written to one of its inputs in place, which it did not do in its first "
                "training forward pass: dcl_optim's companion needs the inputs as the model got them, and clones them "
                "only if that was so. Clone the input at the start of forward (x = x.clone()), or write "
                "nn.ReLU(inplace=False)"
            )
        arguments = self._clones if writes and self._clones is not None else self._arguments
        self._writes = writes or bool(self._writes)
        self._tensors, self._clones, self._arguments = (), None, ((), {})
        return arguments

    def slice(self, arguments: Arguments, batch: int, rows: slice) -> Arguments:
        """Some rows of every tensor with the batch as its first dimension; cloned for a forward pass that writes."""
        return slice_batch(arguments, batch, rows, bool(self._writes))

    def without_arguments(self) -> InputCapture:
        """The same without what was kept, for copies and pickles."""
        found = InputCapture()
        found._writes, found.cuts_rows = self._writes, self.cuts_rows
        return found


def _are_same(call: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != len(call[0]) or kwargs.keys() != call[1].keys():
        return False
    return all(map(is_, args, call[0])) and all(map(is_, kwargs.values(), call[1].values()))


def _clone(tensor: Tensor) -> Tensor:
    # No leaf where it needs a gradient, which the companion's forward could not write to.
    return _detach(tensor).clone()


def detached(arguments: Arguments) -> Arguments:
    """Take a model's arguments out of the graph that they came from."""
    in_graph = any(map(_requires_grad, tensors_of(arguments)))
    return map_tensors(_detach, arguments) if in_graph else arguments


def _detach(tensor: Tensor) -> Tensor:
    # Still in need of a gradient: a reentrant checkpoint inside the companion would skip its block without one.
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def slice_batch(arguments: Arguments, batch: int, rows: slice, clones: bool = False) -> Arguments:
    """Some rows of every tensor that has the batch as its first dimension; of their own, for a forward that writes."""
    if clones:
        return map_tensors(lambda t: t[rows].clone() if _is_cut(t, batch) else t.clone(), arguments)
    return map_tensors(lambda t: t[rows] if _is_cut(t, batch) else t, arguments)


def cut_inputs(arguments: Arguments, batch: int) -> list[str]:
    """The names of the inputs that :func:`slice_batch` cuts.

    Examples:
        >>> cut_inputs(((torch.zeros(4, 2),), {"masks": [torch.zeros(4)], "scale": torch.zeros(1)}), batch=4)
        ['args[0]', "kwargs['masks'][0]"]
    """
    args, kwargs = arguments
    named = [*named_tensors(args, "args"), *named_tensors(kwargs, "kwargs")]
    return [name for name, tensor in named if _is_cut(tensor, batch)]


def _is_cut(tensor: Tensor, batch: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch


def outside_checkpoints() -> AbstractContextManager[Any]:
    """Keep what the companion saves for its backward apart from a checkpoint that the model is called in.

    A non-reentrant checkpoint counts what is saved inside it, and the recomputation, which is the model's alone, has to
    save the same again.
    """
    if saved_tensors_hooks() is not None and any(frames_of("torch.utils.checkpoint")):
        return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    return nullcontext()


def _itself(tensor: Tensor) -> Tensor:
    return tensor
