"""Batches whose loss cannot be read. Not in reader.py, which runs in every step: this is for errors and warnings."""

from __future__ import annotations

import torch
from torch import Tensor

UNREADABLE_SCALE = (
    "the loss scale (gradient scaler, accumulation, weights) cannot be read from this loss's gradient: the penalty "
    "has the factor of torch's GradScaler, or 1.\n  Fix: pass loss_scale=<number, GradScaler or callable> (1 if there "
    "is no factor)"
)
HIDDEN_LABELS = (
    "the model computes its own loss and is compiled, so the labels cannot be read from the gradient of its logits.\n"
    "  Fix: pass targets=<the model's keyword with the labels> (and class_dim=-1 for logits of shape (batch, time, "
    "classes)), or call set_targets(labels) before the forward pass"
)
SOFTMAX_TWICE = (
    "the rows of the model's output are probabilities, and the loss applies softmax to them again.\n"
    "  Fix: remove the softmax layer; F.cross_entropy takes logits. See docs/losses.md"
)
UNREADABLE_LABELS = (
    "the labels of this batch cannot be read from the loss's gradient, which is not that of a softmax cross-entropy "
    "over the model's logits"
)
LATE_LABELS = "set_targets was called after the forward pass of this batch.\n  Fix: call it before, for the next one"
WINDOW = 100  # batches, of which a warning says how many were skipped
GIVE_LABELS = "call set_targets(labels) before the forward pass, or pass targets=<the model's keyword for them>"
NO_LABELS = "use DCLOptimizer, which needs no labels"
# What a gradient shows, and the fix.
ONE_LOGIT = "the model gives one logit a row (binary classification or regression)", NO_LABELS
PROBABILITIES = "the rows of the model's output are probabilities", "remove the softmax layer; use F.cross_entropy"
ONE_ENTRY = (
    "the gradient has one entry a row, as of F.nll_loss, but the outputs are not log-probabilities",
    "use F.cross_entropy, or end the model in log_softmax",
)
TWO_CLASSES = "two classes, with mixed labels, or with weighted or focal rows (pass loss_scale=1 then)", GIVE_LABELS
NO_SOFTMAX = (
    "the gradient's rows do not sum to 0, as of sigmoid outputs, regression, another term, or features (pass logits=)",
    f"{NO_LABELS}; for another loss {GIVE_LABELS}",
)
MIXED = (
    "the gradient has up to two negative entries a row, as of mixed labels (mixup, CutMix)",
    "call set_targets(soft_labels) before the forward pass, with the shares of all classes for each row",
)
ONE_NEGATIVE = (
    "the gradient has one negative entry a row, as of focal losses, margins, scaled logits and sums with a small term",
    f"pass loss_scale=1 if that entry is the label, or {GIVE_LABELS}",
)
SUM = "the gradient has more negative entries a row, as of a sum of losses or of other targets", GIVE_LABELS


def are_probabilities(z: Tensor) -> Tensor:
    """Whether all rows are distributions, as a softmax layer gives them; a scalar, which is not read."""
    tolerance = 0.02 if z.dtype.itemsize < 4 else 1e-4
    return (z.amin() > 0) & ((z.sum(1) - 1).abs().amax() <= tolerance)


def cause_of(z: Tensor, g: Tensor) -> str:
    """Say in two lines what logits and gradient, rows (N, K), show, and the fix. Synchronizes."""
    seen, fix = _cause_of(z, g[g.abs().amax(1) > 0].float())
    return f"\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"


def _cause_of(z: Tensor, g: Tensor) -> tuple[str, str]:
    if g.shape[1] == 1:
        return ONE_LOGIT
    if are_probabilities(z):
        return PROBABILITIES
    if ((g != 0).sum(1) == 1).all():
        return ONE_ENTRY
    if (g.sum(1).abs() > 0.02 * g.abs().sum(1)).float().mean() > 0.1:
        return NO_SOFTMAX
    if g.shape[1] == 2:
        return TWO_CLASSES
    negative = (g < 0).sum(1)
    if (negative == 1).float().mean() > 0.9:
        return ONE_NEGATIVE
    return MIXED if (negative <= 2).float().mean() > 0.9 else SUM


class Skipped:
    """Counts the batches without a penalty; ``fits``: whether the last ones got one, tensors where values wait."""

    def __init__(self) -> None:
        self.fits: list[bool | Tensor] = []
        self._before = 0  # of earlier batches

    def total(self) -> int:
        """Count all of them. Synchronizes."""
        if unknown := [fits for fits in self.fits if isinstance(fits, Tensor)]:
            known = iter(torch.stack([fits.to(unknown[-1].device) for fits in unknown]).tolist())
            self.fits = [next(known) if isinstance(fits, Tensor) else fits for fits in self.fits]
        self._before += self.fits[:-WINDOW].count(False)
        del self.fits[:-WINDOW]
        return self._before + self.fits.count(False)
