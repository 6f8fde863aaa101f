"""What CUDA does for an operation: the kernels that it launches, and how often the host waits for their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Kernels and synchronizations; (1, 0) for all other operations.
COSTS = {
    **dict.fromkeys(("alias", "empty", "empty_strided", "resize_", "split", "unbind"), (0, 0)),
    **dict.fromkeys(("_foreach_norm", "convolution_overrideable", "count_nonzero", "dot", "mse_loss", "sort"), (2, 0)),
    "max_pool2d_with_indices_backward": (2, 0),
    "convolution_backward_overrideable": (3, 0),
    "_local_scalar_dense": (0, 1),
    "repeat_interleave": (1, 1),
    "equal": (3, 1),
    "nonzero": (3, 1),
    "masked_select": (4, 1),
    "bincount": (4, 2),
    "unique_consecutive": (5, 1),
    "_unique2": (6, 1),
}
# Out of place these copy first.
COPYING = ("index_add", "index_copy", "index_fill", "masked_scatter", "scatter", "scatter_add")
INDEXING = ("index", "index_put_", "_index_put_impl_")


class Counts(NamedTuple):
    """Kernels and synchronizations by the operation's name."""

    kernels: Counter[str]
    synchronizations: Counter[str]


_counting: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what is launched inside the block."""
    _counting.append(Counts(Counter(), Counter()))
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def note(name: str, kernels: int, synchronizations: int) -> None:
    """Add to what is being counted."""
    for counts in _counting:
        counts.kernels[name] += kernels
        counts.synchronizations[name] += synchronizations


def note_operation(op: Any, name: str, args: Any, kwargs: Any, on_host: bool) -> None:
    """Add what an operation costs; ``on_host`` says that some of its operands are on the CPU."""
    if op.is_view:
        return
    kernels, synchronizations = COSTS.get(name, (1, 0))
    if name in INDEXING:
        synchronizations += on_host
        if name != "index" and args[2].numel() > 1:  # of one value torch makes a masked_fill_; index has asked nonzero
            masks = sum(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1])
            kernels, synchronizations = kernels + 3 * masks, synchronizations + masks
    kernels += name in COPYING and kwargs.get("out") is not args[0]
    note(name, kernels, synchronizations)
