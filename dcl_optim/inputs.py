"""What the companion runs with: the model's arguments, cut from their graph, and no autocast in its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HIDES_NONE = (Tensor, type(None), int, float, complex, str, bytes, torch.dtype, torch.device)


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
    """Take a model's arguments out of the graph that they came from."""
    return map_tensors(_cut, tree)


def _cut(tensor: Tensor) -> Tensor:
    # Still in need of a gradient: a reentrant checkpoint inside the companion would skip its block without one.
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, item) for item in tree)
    if type(tree) is dict:
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return tree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item)
    elif type(tree) is dict:
        for item in tree.values():
            yield from tensors_of(item)


def is_open(tree: Any) -> bool:
    """Whether :func:`map_tensors` finds every tensor: there are no objects of other classes, which may hold some."""
    if isinstance(tree, HIDES_NONE):
        return True
    if isinstance(tree, (tuple, list)):
        return all(map(is_open, tree))
    return type(tree) is dict and all(map(is_open, tree.values()))


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
