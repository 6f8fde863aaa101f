"""Whether what the first batches show are logits and classes at all: at least eight rows are read.

Not in guards.py, which says when a question is asked: these are the only ones about values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim.guards.messages import IN_BATCH, PROBABILITIES
from dcl_optim.penalty.layout import wide
from dcl_optim.prototypes.labels import classes_of

FEWEST_ROWS = 8  # fewer lie in the order of their labels, or sum to 1, by chance
SUM_TOLERANCE = 1e-4  # of the sum of a row of probabilities
HALF_SUM_TOLERANCE = 2e-2  # where they are in half precision
RESHAPING = ("ToCopy", "View", "UnsafeView", "Unsqueeze", "Squeeze", "Transpose", "Permute", "Slice", "IndexBackward")


class FirstLook:
    """Counts the rows that were read.

    Attributes:
        is_over: whether nothing is to be asked any more.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._num_rows = 0

    def are_probabilities(self, rows: Tensor) -> bool:
        """Look at rows (N, K); whether all of at least eight so far sum to 1, as probabilities do. Synchronizes."""
        if not rows.numel():
            return False
        tolerance = HALF_SUM_TOLERANCE if rows.dtype.itemsize < 4 else SUM_TOLERANCE
        distance_of_sums = (wide(rows).sum(1) - 1.0).abs().amax()
        self._num_rows += len(rows)
        self.is_over = not bool((rows.amin() >= 0) & (distance_of_sums <= tolerance))
        return not self.is_over and self._num_rows >= FEWEST_ROWS


def refuse_in_batch(labels: Tensor, num_classes: int) -> None:
    """Raise ValueError if labels, (N,) or (N, K), are the rows' places, as of in-batch negatives. Synchronizes."""
    number = len(labels)
    if number != num_classes or number < FEWEST_ROWS:
        return
    classes = classes_of(labels)
    is_in_place = classes == torch.arange(number, device=classes.device)
    if bool((is_in_place | (classes == number)).all() & (2 * is_in_place.sum() > number)):
        raise ValueError(IN_BATCH.format(number))


def refuse_sigmoid(logits: Tensor) -> None:
    """Raise ValueError for the output of a sigmoid, also in another shape or dtype."""
    node: Any = logits.grad_fn
    while node is not None and node.name().startswith(RESHAPING):
        node = node.next_functions[0][0]
    if node is not None and node.name() == "SigmoidBackward0":
        raise ValueError(PROBABILITIES)
