"""What the companion runs with: the model's arguments, cut from their graph, and no autocast in its backward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def outside_autocast(device: str) -> Iterator[None]:
    """Leave the script's autocast, which the companion's backward may fall into and no backward is to run under."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)  # not torch.autocast, whose end may empty the cache of all threads
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)


def cut(tree: Any) -> Any:
    """Take a model's arguments out of the graph that they came from.

    What :func:`map_tensors` does not look into (a set, an object of a class of the script's) is handed on as it is: a
    graph inside it is the script's affair.
    """
    return map_tensors(_cut, tree)


def _cut(tensor: Tensor) -> Tensor:
    # Still in need of a gradient: a reentrant checkpoint inside the companion would skip its block without one.
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists, mappings and dataclass instances.

    A mapping of another class than dict, and an instance, is copied if anything in it has changed; else it is itself.

    Examples:
        >>> map_tensors(torch.neg, {"x": [torch.tensor(1.0), "text"]})
        {'x': [tensor(-1.), 'text']}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, item) for item in tree)
    if type(tree) is dict:
        return {key: map_tensors(function, value) for key, value in tree.items()}
    items = _items(tree)
    changed = {key: new for key, old in items.items() if (new := map_tensors(function, old)) is not old}
    if changed:
        tree = copy.copy(tree)
        for key, value in changed.items():
            _put(tree, key, value)
    return tree


def _items(tree: Any) -> dict[Any, Any]:
    """The fields of a dataclass instance, the items of a mapping; nothing of anything else, nor of a module."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, nn.Module)):
        return {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    return dict(tree) if isinstance(tree, MutableMapping) else {}


def _put(tree: Any, key: Any, value: Any) -> None:
    if not dataclasses.is_dataclass(tree):
        tree[key] = value
        return
    try:
        setattr(tree, key, value)  # transformers' ModelOutput keeps an item beside the attribute
    except dataclasses.FrozenInstanceError:
        object.__setattr__(tree, key, value)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """All tensors that :func:`map_tensors` finds, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item)
    else:
        for item in _items(tree).values():
            yield from tensors_of(item)


def to_place(tree: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Bring tensors to the companion's own device, and those of floating point to its own dtype, where it has them."""
    if device is None and dtype is None:
        return tree
    return map_tensors(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None), tree)


def batch_size(tree: Any) -> int:
    """The first dimension of the first tensor that has one."""
    return next((len(tensor) for tensor in tensors_of(tree) if tensor.ndim), 0)


def part(tree: Any, batch: int, rows: slice) -> Any:
    """Some rows of every tensor that has the batch as its first dimension."""
    return map_tensors(lambda t: t[rows] if t.ndim and len(t) == batch else t, tree)
