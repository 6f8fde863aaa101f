"""Autograd's graph, walked from what was computed back to what it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensors: Iterable[Tensor], is_end: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Give the nodes that tensors come from, each once: an end too, but nothing behind it.

    Examples:
        >>> import torch
        >>> z = torch.ones(2, requires_grad=True).exp().sum()
        >>> [node.name() for node in nodes_behind([z], is_end=lambda node: node.name() == "ExpBackward0")]
        ['SumBackward0', 'ExpBackward0']
    """
    seen, waiting = set(), [tensor.grad_fn for tensor in tensors]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_end(node):
            waiting += [before for before, _ in node.next_functions]
