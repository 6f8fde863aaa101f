r"""What the line reads off each backward pass: loss scale, labels and class dimension.

They are those of a plain softmax cross-entropy (:mod:`dcl_optim.loss.cross_entropy`), or are not read at all: then the
penalty term, ``loss + optimizer.penalty(...)``, is the way. The form of the gradient is chosen at the first gradient
that tells it, and again when a batch does not fit, in the next step in which values may be read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dcl_optim.loss.cross_entropy import LOG, Form, Reading, arithmetics, best, choices, read, tells_form, wide_dtype
from dcl_optim.penalty.layout import to_rows
from dcl_optim.penalty.pull import Scale
from dcl_optim.progress import Forward, Outcome
from dcl_optim.pytorch.internals import warn

PATIENCE = 20  # first batches that may tell nothing
TRUSTED = 100  # steps, after which unread batches are told of again
SAMPLE = 2**20  # logits that the first look takes
SUMS_TO_ZERO = 0.02  # of the absolute values
SAVED = {"smoothing": float | None, "in_float32": bool, "scale": float | None, "class_dim": int | None}
TERMS = {False: "loss + optimizer.penalty(logits)", True: "loss + optimizer.penalty(logits, labels)"}

UNREADABLE = (
    "{name} cannot read {what} from the loss's gradient, which is not that of a plain softmax cross-entropy over the "
    "model's logits.\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"
)
NO_CLASSES = "one logit a row, as of binary classification or regression, which has no classes, or no batch dimension"
SUMS = (
    "the gradient's rows do not sum to 0, as of sigmoid outputs, probabilities, regression, hidden states that the "
    "loss takes to the last layer, or another term"
)
FACTORS = (
    "the rows have different factors, as with class weights, focal or symmetric losses, or more than one class, as "
    "with mixup, or the logits are changed before the loss"
)
NOTHING = (
    "batches that show no form: single rows of two classes, a model that is certain of every row, or other values than "
    "logits"
)


class LossReader:
    """Reads one backward pass after another.

    Args:
        name: of the optimizer, for errors.
        reads_labels: whether labels are needed, or the scale alone.

    Attributes:
        class_dim: the dimension of the classes, of logits with more than two; None before it is known.
        scale: the last s that was read; None before one was.
        not_found: why an output of the model showed no logits.
        num_skipped: gradients that were not read, of those that were counted.
    """

    def __init__(self, name: str, reads_labels: bool) -> None:
        self.reads_labels = reads_labels
        self.term = TERMS[reads_labels]
        self.class_dim: int | None = None
        self.scale: Scale | None = None
        self.not_found = ""
        self.num_skipped = 0
        self._name = name
        self._form: Form | None = None  # of the gradients; None before one is known
        self._num_silent = 0  # gradients that told nothing, before a form is known
        self._num_said = 0  # unread gradients of which the last warning told
        self._not_counted: list[tuple[Tensor, Tensor]] = []  # num_live and fits of readings that were not looked at

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know. Synchronizes."""
        form = self._form or Form(0.0)
        scale = None if self.scale is None else float(self.scale)
        saved = {"smoothing": self._form and form.smoothing, "in_float32": form.in_float32}
        return saved | {"scale": scale, "class_dim": self.class_dim}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._form = None if state["smoothing"] is None else Form(state["smoothing"], state["in_float32"])
        self.scale = state["scale"]
        self.class_dim = state["class_dim"]

    def read(self, forward: Forward, gradient: Tensor) -> Reading | None:
        """Read the gradient of the logits, and lay them out as rows.

        The scale of the reading is the last one where the gradient tells none. Without labels it is 0 if the gradient
        does not have the known form, which a device does not say before values may be read.

        Args:
            forward: the forward pass.
            gradient: of its logits.

        Returns:
            None for a gradient that is zero or not finite, that tells nothing, or that has no known form.
        """
        if not gradient.numel():  # a batch without rows says nothing
            return None
        reading = None
        dim = 1 if gradient.ndim <= 2 else self.class_dim
        if self._form is not None and dim is not None:
            reading = self._read_by(self._form, forward, gradient, dim)
        if reading is None or (forward.may_read and not bool(reading.fits)):
            reading = self._choose(forward, gradient, dim)
            if reading is None:
                return None
        elif not forward.may_read:
            self._not_counted.append((reading.num_live, reading.fits))
            if not self.reads_labels:
                reading = reading._replace(scale=reading.scale * reading.fits)
        self.scale = reading.scale
        return reading

    def _read_by(self, form: Form, forward: Forward, gradient: Tensor, dim: int) -> Reading:
        last = self.scale
        if dim != forward.class_dim:
            forward.lay_out(dim)
        z = forward.rows
        dtype = wide_dtype(z.dtype)
        if last is not None and not (isinstance(last, Tensor) and last.dtype == dtype and last.device == z.device):
            last = torch.as_tensor(last).to(z.device, dtype)
        return read(form, z, to_rows(gradient, dim), last, self.reads_labels)

    def _choose(self, forward: Forward, gradient: Tensor, known_dim: int | None) -> Reading | None:
        """Choose form and class dimension, and read."""
        total = _total(gradient)
        if not 0 < total < math.inf:
            self.num_skipped += total != 0 and forward.outcome is Outcome.OPEN
            return None
        tells = False
        sums = False
        for dim in range(1, max(gradient.ndim, 2)) if known_dim is None else (known_dim,):
            z, g = _sample(*(to_rows(tensor, dim) for tensor in (forward.logits, gradient)))
            forms = [Form(LOG)] if tells_form(z, g) else []
            if _sums_to_zero(gradient, dim, total):  # along the classes, of a softmax cross-entropy
                tells = tells if sums else bool(forms) or z.shape[1] == 1
                sums = True
                if forms:
                    forms += choices(z, g)
                elif self._form is not None:  # whose arithmetic may show once the model fits
                    forms = [self._form._replace(in_float32=one) for one in arithmetics(z)]
            readings = {form: self._read_by(form, forward, gradient, dim) for form in forms}
            form = best(readings)
            if form is not None:
                self._form = form
                self.class_dim = dim if gradient.ndim > 2 else None
                return readings[form]
        self._refuse(forward, tells or not sums, sums)
        return None

    def _refuse(self, forward: Forward, tells: bool, sums: bool) -> None:
        """A gradient has no known form: an error if none was known before, else a warning."""
        message = self._unreadable(forward, tells, sums)
        if self._form is None:
            self._num_silent += 1
            if tells or self._num_silent >= PATIENCE:
                raise RuntimeError(message)
        if forward.outcome is not Outcome.OPEN:  # these logits have their penalty from another loss
            return
        self.num_skipped += 1
        if self._form is not None and (
            not self._num_said or (forward.step_number > TRUSTED and self.num_skipped >= 2 * self._num_said)
        ):
            so_far = f", {self.num_skipped} so far" if self._num_said else ""
            warn(f"a batch gets no penalty{so_far}: {message}")
            self._num_said = self.num_skipped

    def _unreadable(self, forward: Forward, tells: bool, sums: bool) -> str:
        """The message about a gradient that cannot be read."""
        fix = f"add the penalty to the loss, {self.term}"
        if self.reads_labels:
            fix += "; without labels use DCLOptimizer"
        if forward.is_one_of_several:
            fix = f"if the logits are another tensor of the output, pass logits=lambda output: output[1]; else {fix}"
        if forward.rows.shape[1] == 1:
            seen = NO_CLASSES
        elif not tells:
            seen = NOTHING
        else:
            seen = FACTORS if sums else SUMS
        what = "the labels" if self.reads_labels else "the factor"
        return UNREADABLE.format(name=self._name, what=what, seen=seen, fix=fix)

    def count(self) -> None:
        """Count the unread gradients of those that were noted. Synchronizes."""
        if self._not_counted:
            num_live, fits = map(torch.stack, zip(*self._not_counted, strict=True))
            self.num_skipped += int(((num_live > 0) & ~fits).sum())
            self._not_counted = []


def _sample(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have a gradient, at most SAMPLE numbers of them."""
    num_rows = max(SAMPLE // z.shape[1], 1)
    if len(z) <= num_rows:
        return z, g
    rows = torch.maximum(g.amax(1), -g.amin(1)).nonzero().flatten()
    rows = rows[:: -(-len(rows) // num_rows)]
    return z[rows], g[rows]


def _total(gradient: Tensor) -> float:
    """The sum of absolute values, which synchronizes."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return float(gradient.abs().sum(dtype=dtype))  # a CPU's 1-norm in float32 adds up in one number, off by half


def _sums_to_zero(gradient: Tensor, dim: int, total: float) -> bool:
    if gradient.ndim <= 1:
        return False
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return _total(gradient.sum(dim, dtype=dtype)) <= SUMS_TO_ZERO * total
