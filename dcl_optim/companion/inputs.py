"""The companion's inputs: the model's arguments out of their graph, or a part of them."""

from __future__ import annotations

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


class Kept:
    """The model's arguments, kept for the companion as the model gets them.

    Out of their graph, and in containers of their own, from which the model's forward takes nothing away. Tensors that
    it may write to are cloned, if ``clones`` says so.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], clones: bool) -> None:
        self._args, self._kwargs = args, kwargs
        self._tensors = tensors_of((args, kwargs))
        self._versions = versions_of(self._tensors)
        self.arguments: Arguments = args, kwargs
        self._clones: Arguments | None = map_tensors(_clone, self.arguments) if clones else None
        if any(map(_requires_grad, self._tensors)) or not PLAIN.issuperset(map(type, chain(args, kwargs.values()))):
            self.arguments = map_tensors(_detach, self.arguments)

    def are_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the arguments, and not what a later pre-hook has put in their place."""
        if args is self._args and kwargs is self._kwargs:
            return True
        if len(args) != len(self._args) or kwargs.keys() != self._kwargs.keys():
            return False
        return all(map(is_, args, self._args)) and all(map(is_, kwargs.values(), self._kwargs.values()))

    def use_clones_if_written(self) -> bool:
        """After the model's forward: say whether it has written to a tensor in place.

        Raises:
            RuntimeError: it has, and there are no clones.
        """
        if versions_of(self._tensors) == self._versions:
            return False
        if self._clones is None:
            raise RuntimeError(
                "the model's forward has written to one of its inputs in place, which it did not do in its first "
                "training forward: dcl_optim's companion needs the inputs as the model got them, and keeps copies of "
                "them only where that was so. Clone the input at the start of the forward (x = x.clone()), or write "
                "nn.ReLU(inplace=False)"
            )
        self.arguments = self._clones
        return True


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


def part(arguments: Arguments, batch: int, rows: slice, clones: bool = False) -> Arguments:
    """Some rows of every tensor that has the batch as its first dimension; of their own, for a forward that writes."""
    if clones:
        return map_tensors(lambda t: t[rows].clone() if _is_cut(t, batch) else t.clone(), arguments)
    return map_tensors(lambda t: t[rows] if _is_cut(t, batch) else t, arguments)


def cut_inputs(arguments: Arguments, batch: int) -> list[str]:
    """The names of the inputs that :func:`part` cuts.

    Examples:
        >>> cut_inputs(((torch.zeros(4, 2),), {"masks": [torch.zeros(4)], "scale": torch.zeros(1)}), batch=4)
        ['args[0]', "kwargs['masks'][0]"]
    """
    args, kwargs = arguments
    named = [*named_tensors(args, "args"), *named_tensors(kwargs, "kwargs")]
    return [name for name, tensor in named if _is_cut(tensor, batch)]


def _is_cut(tensor: Tensor, batch: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch


def outside_autocast(device: str) -> AbstractContextManager[Any]:
    """Leave the script's autocast, under which no backward is to run, though the companion's may be called there."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


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
