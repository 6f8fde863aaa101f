"""Tensors in nested tuples, lists, dicts and dataclasses, such as the arguments of a model.

Apart from companion/inputs.py, which says when arguments are kept, and not how containers are taken apart.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor; objects of other classes are handed on as they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[map_tensors(function, item) for item in tree])
    if isinstance(tree, (tuple, list)):
        return type(tree)([map_tensors(function, item) for item in tree])
    if type(tree) is dict:
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, MutableMapping):  # BatchEncoding, ModelOutput, OrderedDict
        mapping = copy.copy(tree)
        for key, value in tree.items():
            mapping[key] = map_tensors(function, value)
        return mapping
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, nn.Module)):
        instance = copy.copy(tree)  # not dataclasses.replace, which runs __post_init__ again
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(instance, field.name, map_tensors(function, getattr(tree, field.name)))
        return instance
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors that :func:`map_tensors` reaches, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found
