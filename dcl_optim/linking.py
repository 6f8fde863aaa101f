"""Which forwards a call of the criterion is about: by the very output, else by the graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dcl_optim.forecaster import Forward
from dcl_optim.inputs import tensors_of


def concerned(waiting: list[Forward], arguments: Any) -> tuple[list[Forward], bool]:
    """Find the forwards that a call of the criterion is about among those that wait for a backward.

    Args:
        waiting: the forwards.
        arguments: what the criterion was called with, tensors in nested tuples, lists and dicts.

    Returns:
        The forwards, and whether the criterion was given their very outputs. If it was not, a single forward is it in
        any case, and of several those whose outputs its arguments were computed from, as by ``torch.cat``.
    """
    tensors = [tensor for tensor in tensors_of(arguments) if tensor.requires_grad]
    exact = [forward for forward in waiting if any(map(forward.produced, tensors))]
    if exact or len(waiting) < 2:
        return exact or waiting, bool(exact)
    nodes = _reached(tensors, {forward.node for forward in waiting})
    return [forward for forward in waiting if forward.node in nodes], False


def _reached(tensors: Iterable[Tensor], wanted: set[int]) -> set[int]:
    """The wanted ones, by number, of the autograd nodes that tensors come from; not those behind them."""
    found, seen, stack = set(), set(), [tensor.grad_fn for tensor in tensors]
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if number in wanted:
            found.add(number)
        else:
            stack += [before for before, _ in node.next_functions]
    return found
