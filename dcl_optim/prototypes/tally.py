r"""What prototypes hold, what batches show, and how the one moves toward the other (Equation 6).

A step that is skipped drops the tally. Only :func:`learn_` writes to the state, in place: it has K² numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dcl_optim.pytorch.internals import constant

TINY = 1e-30  # labeled rows before the first step, so that the accuracy is 0 then
NEVER = -1e30  # rows; not infinite, which alpha = 0 would make nan
DECAY = 0.98  # of the running mean of the training accuracy, a step


class State(NamedTuple):
    """What a checkpoint holds, and a row for the rows without a label, which no step gives a number above 0.

    Attributes:
        values: the prototypes, (K + 1, K).
        numbers: n, (K + 1,).
        fit: decayed numbers of the rows that were predicted right, and of those with a label, (2,).
    """

    values: Tensor
    numbers: Tensor
    fit: Tensor

    def saved(self) -> dict[str, Tensor]:
        """Views of what a resumed run has to know."""
        return {"values": self.values[:-1], "numbers": self.numbers[:-1], "fit": self.fit}


def new_state(num_classes: int, dtype: torch.dtype, device: torch.device) -> State:
    """The state before the first step."""
    values = torch.zeros(num_classes + 1, num_classes, dtype=dtype, device=device)
    return State(values, values.new_zeros(num_classes + 1), values.new_tensor([0.0, TINY]))


class Tally:
    """What batches since the last step show: sums, so that micro-batches and ranks add up.

    Args:
        no_rows: the counts of no batch, which are copied.

    Attributes:
        counts: the rows of each class, and those without a label, (K + 1,).
        num_right: those that were predicted right, a scalar.
        parts: classes and differences z - p of rows, as long as there are no more rows than classes.
        sums: the differences by class, (K + 1, K); None as long as there are parts alone.
    """

    def __init__(self, no_rows: Tensor) -> None:
        self.counts = no_rows.clone()
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.sums: Tensor | None = None
        self.num_right: float | Tensor = 0.0

    def add_rows(self, classes: Tensor, apart: Tensor) -> None:
        """Add rows of one class each, with their differences z - p."""
        one = constant(1.0, classes.device).to(self.counts.dtype)
        self.counts.index_add_(0, classes, one.expand(len(classes)))
        self.parts.append((classes, apart))
        if sum(len(rows) for rows, _ in self.parts) > len(self.counts) - 1:
            self.sum_by_class()  # which takes less memory than the rows

    def sum_by_class(self) -> Tensor:
        """Add the differences up by class, (K + 1, K)."""
        if self.sums is None:
            self.sums = self.counts.new_zeros(len(self.counts), len(self.counts) - 1)
        for classes, apart in self.parts:
            self.sums.index_add_(0, classes, apart)
        self.parts = []
        return self.sums

    def add_shares(self, shares: Tensor, z: Tensor, known: Tensor, has_masks: bool) -> None:
        """Add rows that count for each class by its share. Entries of z that are not finite, set to 0, do not.

        Args:
            shares, z: (N, K), and logits (N, K).
            known: the prototypes.
            has_masks: whether entries of finite rows may be masked.
        """
        counts = shares.sum(0)
        with torch.autocast(z.device.type, enabled=False):
            weights = shares.T @ z.isfinite().to(z) if has_masks else counts.unsqueeze(1)
            self.sum_by_class()[:-1] += shares.T @ z.nan_to_num_(0.0, 0.0, 0.0) - weights * known
        self.counts[:-1] += counts


def learn_(state: State, tally: Tally, alpha: float, counts_rows: bool) -> None:
    r"""Move the prototypes, in place.

    Args:
        state: what moves.
        tally: what the batches of the step show.
        alpha: the share of what was learned before, in [0, 1].
        counts_rows: whether each row counts alike,
            :math:`n_k \leftarrow \alpha n_k + m_k,\; p^k \leftarrow p^k + \frac{1}{n_k}\sum (z_i - p^k)`; else each
            batch, which is Equation 6, where the first mean becomes the prototype. Only classes with a row in the step
            change, but in a step without any labeled row all n age.
    """
    counts = tally.counts
    is_here = counts > constant(0.0, counts.device)
    ages = is_here >= is_here.any()  # the classes that are here, or all if none is
    if counts_rows:
        numbers = torch.add(counts, state.numbers, alpha=alpha)
        divisors = numbers
    else:
        numbers = torch.maximum(alpha * state.numbers, is_here.to(counts))
        divisors = counts / (1.0 - alpha * state.numbers.clamp(0.0, 1.0))
    torch.where(ages, numbers, state.numbers, out=state.numbers)
    divisors = torch.where(is_here, divisors, constant(math.inf, counts.device)).unsqueeze(1)
    # Now n is that of after the step, and the tally has differences to the prototypes of before: add them, divided.
    if tally.sums is not None:
        state.values.addcdiv_(tally.sums, divisors)
    for classes, apart in tally.parts:
        state.values.index_add_(0, classes, apart.div_(divisors.index_select(0, classes)))


def learn_fit_(state: State, tally: Tally) -> None:
    """Add to the numbers of rows that were predicted right and that have a label, in place."""
    fit = torch.stack((torch.as_tensor(tally.num_right).to(state.fit), tally.counts[:-1].sum()))
    torch.add(fit, state.fit, alpha=DECAY, out=state.fit)
