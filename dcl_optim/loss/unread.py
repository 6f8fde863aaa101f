"""Batches whose loss cannot be read. Not in reader.py, which runs in every step: this is for errors and warnings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dcl_optim._sync import Question
from dcl_optim.loss.cross_entropy import Evidence, Gradient

WINDOW = 100  # batches, of which a warning says how many were skipped

TERM = "loss + optimizer.penalty(logits)"  # as DCLOptimizer writes it
TERM_WITH_LABELS = "loss + optimizer.penalty(logits, labels)"
UNREADABLE = (
    "{name} cannot read {what} from the loss's gradient, which is not that of a softmax cross-entropy over the "
    "model's logits.\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"
)
NOTHING = "batches that show no form: single rows of two classes, or a model that is certain of every row"
NEEDS_LOGITS = "return logits or log_softmax from the model, or pass logits=, and use F.cross_entropy or F.nll_loss"
NEEDS_CLASSES = f"give the model one output for each class, or use DCLOptimizer with {TERM} (no gain was measured)"
MANY_SKIPPED = (
    "{number} of the last {window} batches got no penalty: {name} cannot read the gradient of their loss.\n"
    "  Fix: add the penalty to the loss, {term}. See docs/losses.md"
)
SOFTMAX_TWICE = (
    "the rows of the model's output are probabilities, and the loss applies softmax to them again.\n"
    "  Fix: remove the softmax layer; F.cross_entropy takes logits. See docs/troubleshooting.md"
)


def term_of(reads_labels: bool) -> str:
    """The penalty term as an optimizer writes it that needs labels, or none."""
    return TERM_WITH_LABELS if reads_labels else TERM


def unreadable(name: str, seen: list[tuple[Gradient, Evidence]], reads_labels: bool) -> str:
    """The message about a gradient that an optimizer cannot read. Synchronizes.

    Args:
        name: of the optimizer.
        seen: the gradient as rows and what it says, along each dimension that may be that of the classes.
        reads_labels: whether the optimizer needs labels.
    """
    what = "the labels" if reads_labels else "the factor"
    gradient, evidence = min(seen, key=lambda one: float(one[0].g.float().sum(1).abs().sum()))
    found = _seen_in(gradient, evidence) if all(one.says for _, one in seen) else NOTHING
    return UNREADABLE.format(name=name, what=what, seen=found, fix=_fix_of(gradient, evidence, reads_labels))


def _fix_of(gradient: Gradient, evidence: Evidence, reads_labels: bool) -> str:
    if evidence.is_softmax:
        return NEEDS_LOGITS
    if reads_labels and gradient.g.shape[1] == 1:
        return NEEDS_CLASSES
    fix = f"add the penalty to the loss, {term_of(reads_labels)}"
    return f"{fix}; rows without one class each need DCLOptimizer and its term" if reads_labels else fix


def _seen_in(gradient: Gradient, evidence: Evidence) -> str:
    """Say in a line what a gradient shows."""
    if evidence.is_softmax:
        return "the rows of the model's output are probabilities"
    g = gradient.g
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
