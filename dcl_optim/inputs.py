"""What the companion runs with: the model's arguments, cut from their graph, and no autocast in its backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def outside_autocast(device: str) -> AbstractContextManager[Any]:
    """Leave the script's autocast, which the companion's backward may fall into and no backward is to run under."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


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
