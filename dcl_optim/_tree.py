"""Tensors in nested tuples, lists, dicts and dataclasses, such as the arguments of a model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
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
    if _is_dataclass_instance(tree):
        instance = copy.copy(tree)  # not dataclasses.replace, which runs __post_init__ again
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(instance, field.name, map_tensors(function, getattr(tree, field.name)))
        return instance
    return tree


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module))


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in order."""
    found: list[Tensor] = []
    waiting = [tree]
    while waiting:  # no recursion: a step asks for the tensors of its arguments several times
        item = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            waiting += item[::-1]
        elif isinstance(item, Mapping):
            waiting += list(item.values())[::-1]
        elif _is_dataclass_instance(item):
            waiting += [getattr(item, field.name, None) for field in dataclasses.fields(item)][::-1]
    return found
