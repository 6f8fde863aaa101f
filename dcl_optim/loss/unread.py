"""Batches whose loss cannot be read. Not in reader.py, which runs in every step: this is for errors and warnings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dcl_optim._sync import Question

WINDOW = 100  # batches, of which a warning says how many were skipped

TERM = "loss + optimizer.penalty(logits)"  # as DCLOptimizer writes it
TERM_WITH_LABELS = "loss + optimizer.penalty(logits, labels)"
UNREADABLE_LABELS = (
    "{name} cannot read the labels from this loss's gradient, which is not that of a softmax cross-entropy over the "
    "model's logits.\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"
)
ADD_THE_TERM = f"add the penalty to the loss, {TERM_WITH_LABELS}; rows without one class each need DCLOptimizer"
NEEDS_CLASSES = "give the model one output for each class, or use DCLOptimizer (no gain was measured)"
UNREADABLE_SCALE = (
    "{name} cannot read what this loss is multiplied by (gradient scaler, accumulation, weights) from its gradient, "
    "which is not that of a softmax cross-entropy over the model's logits.\n"
    f"  Fix: add the penalty to the loss, {TERM}. See docs/losses.md"
)
MANY_SKIPPED = (
    "{number} of the last {window} batches got no penalty: {name} cannot read their labels from the loss's gradient.\n"
    f"  Fix: add the penalty to the loss, {TERM_WITH_LABELS}. See docs/losses.md"
)
SOFTMAX_TWICE = (
    "the rows of the model's output are probabilities, and the loss applies softmax to them again.\n"
    "  Fix: remove the softmax layer; F.cross_entropy takes logits. See docs/troubleshooting.md"
)


def term_of(reads_labels: bool) -> str:
    """The penalty term as an optimizer writes it that needs labels, or none."""
    return TERM_WITH_LABELS if reads_labels else TERM


def unreadable_labels(name: str, g: Tensor) -> str:
    """The message about a gradient, rows (N, K), from which an optimizer cannot read labels. Synchronizes."""
    fix = NEEDS_CLASSES if g.shape[1] == 1 else ADD_THE_TERM
    return UNREADABLE_LABELS.format(name=name, seen=_seen_in(g), fix=fix)


def _seen_in(g: Tensor) -> str:
    """Say in a line what a gradient, rows (N, K), shows."""
    if g.shape[1] == 1:
        return "one logit a row, as of binary classification or regression, which has no classes, or no batch dimension"
    g = g[g.abs().amax(1) > 0].float()
    if (g.sum(1).abs() > 0.02 * g.abs().sum(1)).float().mean() > 0.1:
        return "the gradient's rows do not sum to 0, as of sigmoid outputs, probabilities, regression or another term"
    return (
        "the gradient's rows sum to 0, as of class weights with smoothing, a temperature, a sum of losses, mixup of "
        "fewer than five classes, or logits that are changed before the loss"
    )


class Skipped:
    """Counts the batches without a penalty; of the last ones it knows which, as tensors where values wait."""

    def __init__(self) -> None:
        self._fits: list[bool | Tensor] = []
        self._num_before = 0  # of earlier batches

    def add(self, fits: bool | Tensor) -> None:
        """Note whether a batch was read."""
        self._fits.append(fits)

    def questions(self, answered: Callable[[], None]) -> list[Question]:
        """What waits on a device, and what to call when it is known."""
        waiting = [fits for fits in self._fits if isinstance(fits, Tensor)]
        if not waiting:
            self._answer([], answered)
            return []
        together = torch.stack([fits.to(waiting[-1].device) for fits in waiting])
        return [Question(together, lambda values: self._answer(values, answered))]

    def _answer(self, values: list[float], answered: Callable[[], None]) -> None:
        known = iter(values)
        self._fits = [bool(next(known)) if isinstance(fits, Tensor) else fits for fits in self._fits]
        self._num_before += self._fits[:-WINDOW].count(False)
        del self._fits[:-WINDOW]
        answered()

    def recent(self) -> tuple[int, int]:
        """How many of the last batches were skipped, and of how many."""
        return self._fits.count(False), len(self._fits)

    def total(self) -> int:
        """Count all of them. Synchronizes."""
        return self._num_before + sum(not bool(fits) for fits in self._fits)
