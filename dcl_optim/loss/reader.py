r"""What the line reads off each backward pass: loss scale, labels and class dimension.

They are those of a plain softmax cross-entropy (:mod:`dcl_optim.loss.cross_entropy`), or are not read at all: then the
penalty term, ``loss + optimizer.penalty(...)``, is the way. The form of the gradient is chosen at the first gradient
that tells it, and again when a batch does not fit, in the next step in which values may be read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim._torch import warn_once
from dcl_optim._validation import check_state
from dcl_optim.forecaster import Labels
from dcl_optim.layout import to_rows
from dcl_optim.loss.cross_entropy import LOG, Reading, examine, read
from dcl_optim.progress import Forward, Outcome
from dcl_optim.pull import Scale

PATIENCE = 20  # batches in a row that may tell nothing
SAMPLE = 2**20  # logits that the first look takes
SUMS_TO_ZERO = 0.02  # of the absolute values
TERMS = {False: "loss + optimizer.penalty(logits)", True: "loss + optimizer.penalty(logits, labels)"}

UNREADABLE = (
    "{name} cannot read {what} from the loss's gradient, which is not that of a plain softmax cross-entropy over the "
    "model's logits.\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"
)
IN_A_ROW = "{} batches in a row got no penalty: "
NO_CLASSES = "one logit a row, as of binary classification or regression, which has no classes, or no batch dimension"
SUMS = "the gradient's rows do not sum to 0, as of sigmoid outputs, probabilities, regression or another term"
FACTORS = (
    "the rows have different factors, as with class weights, focal or symmetric losses, or more than one class, as "
    "with mixup, or the logits are changed before the loss"
)
WITHOUT_LABELS = "; without labels use DCLOptimizer"
OF_AN_ATTACK = "; in an attack use torch.autograd.grad, or model.eval()"
NOTHING = (
    "batches that show no form: single rows of two classes, a model that is certain of every row, or other values than "
    "logits"
)
NOT_FINITE = "logits that are not finite, in rows that the loss ignores"
PROBABILITIES = "the rows of the model's output are probabilities"
NEEDS_LOGITS = "return logits from the model, take their softmax in the loss, and "
SOFTMAX_TWICE = (
    f"{PROBABILITIES}, and the loss applies softmax to them again.\n"
    "  Fix: remove the softmax layer; F.cross_entropy takes logits. See docs/troubleshooting.md"
)


class Loss(NamedTuple):
    """What a backward pass says about the script's loss.

    Attributes:
        scale: s, what the loss was multiplied by.
        labels: the labels, if they are needed and were read.
        fits: whether the gradient has the form that was read, a scalar; None if none was.
        is_finite: False if the gradient is known not to be finite.
    """

    scale: Scale
    labels: Labels | None = None
    fits: Tensor | None = None
    is_finite: bool = True


class Known(NamedTuple):
    """What the reader knows: its state.

    Attributes:
        form: of the gradient, see :func:`~dcl_optim.loss.cross_entropy.read`; None before one is known.
        scale: the last s that was read.
        class_dim: the dimension of the classes, of logits with more than two.
        num_silent: how many of the last batches with a gradient, one after the other, were not read.
    """

    form: float | None = None
    scale: Scale | None = None
    class_dim: int | None = None
    num_silent: int = 0


SAVED = {"form": float | None, "scale": float | None, "class_dim": int | None, "num_silent": int}


class _Seen(NamedTuple):
    """What is counted of a batch when values may be read.

    Attributes:
        backward: the backward pass, by autograd's number.
        num_live: how many rows have a gradient, or whether any has.
        fits: whether its loss was read.
    """

    backward: int
    num_live: Tensor | float
    fits: Tensor | float

    @property
    def is_missed(self) -> bool:
        """Whether there was a loss to read, and it was not read."""
        return bool(self.num_live) and not self.fits


class LossReader:
    """Reads one backward pass after another.

    Args:
        name: of the optimizer, for errors.
        reads_labels: whether labels are needed, or the scale alone.
    """

    def __init__(self, name: str, reads_labels: bool) -> None:
        self.reads_labels = reads_labels
        self.term = TERMS[reads_labels]
        self.known = Known()
        self._name = name
        self.not_found = ""  # why an output of the model showed no logits
        self._said: set[str] = set()
        self._num_skipped = 0
        self._not_counted: list[_Seen] = []

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know. Synchronizes."""
        self.num_skipped()
        scale = self.known.scale
        return self.known._replace(scale=None if scale is None else float(scale))._asdict()

    def check_state(self, state: Any) -> None:
        """Raise ValueError if a state does not fit."""
        check_state(state, SAVED, "loss")

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.known = Known(**state)

    def dim_of(self, logits: Tensor) -> int | None:
        """The dimension of the classes; None while it is not known."""
        dim = 1 if logits.ndim <= 2 else self.known.class_dim
        if dim is not None and dim >= max(logits.ndim, 2):
            raise ValueError(
                f"the logits have shape {tuple(logits.shape)}, but the classes were along dimension {dim} before: keep "
                f"their layout, or use the penalty term, {self.term}"
            )
        return dim

    def read(self, forward: Forward, gradient: Tensor) -> Loss:
        """Read the gradient of the logits, and lay them out as rows.

        Args:
            forward: the forward pass.
            gradient: of its logits.
        """
        if not gradient.numel():  # a batch without rows says nothing
            return self._loss_of(None, is_finite=True)
        reading: Reading | None = None
        is_finite = True
        may_read = True  # until the form is known
        dim = self.dim_of(gradient)
        if self.known.form is not None and dim is not None:
            may_read = forward.may_read
            if dim != forward.class_dim:
                forward.lay_out(dim)
            reading = read(self.known.form, forward.rows, to_rows(gradient, dim), self.reads_labels)
        if may_read and (reading is None or not bool(reading.fits)):
            reading, total = self._choose(forward, gradient, dim)
            is_finite = total < math.inf  # false for nan too
            if is_finite:
                self._note(forward, total > 0, reading is not None)
            elif forward.outcome is Outcome.OPEN:
                self.skip()
        elif may_read:
            self._note(forward, True, True)
        elif reading is not None:
            self._note(forward, reading.num_live, reading.fits)
        return self._loss_of(reading, is_finite)

    def _note(self, forward: Forward, num_live: Tensor | bool, fits: Tensor | bool) -> None:
        if forward.outcome is Outcome.OPEN:  # else these logits have their penalty from another loss
            self._not_counted.append(_Seen(forward.backward, num_live, fits))

    def _loss_of(self, reading: Reading | None, is_finite: bool) -> Loss:
        last = 1.0 if self.known.scale is None else self.known.scale
        if reading is None:
            return Loss(last, None, None, is_finite)
        if not isinstance(last, Tensor):
            last = torch.full_like(reading.scale, last)
        scale = torch.where(reading.tells_scale, reading.scale, last.to(reading.scale))
        self.known = self.known._replace(scale=scale)
        if self.reads_labels:
            return Loss(scale, Labels(reading.labels, reading.num_live), reading.fits)
        return Loss(scale * reading.fits, None, reading.fits)

    def _choose(self, forward: Forward, gradient: Tensor, known_dim: int | None) -> tuple[Reading | None, float]:
        """Choose form and class dimension, and read; give also the sum of the gradient's absolute values."""
        total = _total(gradient)
        if not 0 < total < math.inf:
            if total == 0 and gradient[0].numel() == 1:  # a softmax of one logit is 1
                warn_once(self._said, f"a batch gets no penalty: {self._unreadable(forward.rows, 0, 0, False, False)}")
            return None, total
        dims = range(1, max(gradient.ndim, 2)) if known_dim is None else [known_dim]
        # Along the classes the gradient of a softmax cross-entropy sums to 0.
        sums = [dim for dim in dims if _sums_to_zero(gradient, dim, total)]
        dim = (sums or dims)[0]
        z = to_rows(forward.logits, dim)
        evidence = examine(*_sample(z, to_rows(gradient, dim)))
        says = evidence.says or z.shape[1] == 1
        if says:
            forms = [(form, dim) for dim in sums for form in dict.fromkeys((evidence.smoothing, 0.0))]
            forms += [(LOG, dim) for dim in dims]
            reading = self._read_first_that_fits(forward, gradient, forms)
            if reading is not None:
                if evidence.is_softmax and self.known.form != LOG:
                    warn_once(self._said, SOFTMAX_TWICE)
                return reading, total
        message = self._unreadable(z, evidence.is_softmax, says, bool(sums), forward.is_one_of_several)
        self._refuse(forward, message, says > 0)
        return None, total

    def _read_first_that_fits(
        self, forward: Forward, gradient: Tensor, forms: list[tuple[float, int]]
    ) -> Reading | None:
        """Try forms and class dimensions; keep the first pair that fits."""
        for form, dim in forms:
            reading = read(form, to_rows(forward.logits, dim), to_rows(gradient, dim), self.reads_labels)
            if bool(reading.fits):
                self.known = Known(form, self.known.scale, dim if gradient.ndim > 2 else None)
                if dim != forward.class_dim:
                    forward.lay_out(dim)
                return reading
        return None

    def _refuse(self, forward: Forward, message: str, says: bool) -> None:
        """A gradient has no known form: an error if none was known before, or of many in a row; else a warning."""
        is_known = self.known.form is not None
        if says and not is_known:
            raise RuntimeError(message)
        if (says or not is_known) and self._num_silent() + 1 >= PATIENCE:  # a model may be certain for good
            raise RuntimeError(IN_A_ROW.format(PATIENCE) + message if is_known else message)
        # Else the batch may say nothing by chance, or these logits have their penalty from another loss.
        if forward.outcome is Outcome.OPEN and (is_known or forward.is_one_of_several):
            warn_once(self._said, f"a batch gets no penalty: {message}", "a batch")

    def _unreadable(self, z: Tensor, is_softmax: float, says: float, sums: bool, several: bool) -> str:
        """The message about a gradient that cannot be read."""
        fix = f"add the penalty to the loss, {self.term}"
        if self.reads_labels:
            fix += WITHOUT_LABELS
        if several:
            fix = f"if the logits are another tensor of the output, pass logits=lambda output: output[1]; else {fix}"
        if z.shape[1] == 1:
            seen = NO_CLASSES
            if self.reads_labels:
                fix = f"give the model one output for each class, or use DCLOptimizer with {TERMS[False]}"
        elif is_softmax:
            seen = PROBABILITIES
            fix = f"{NEEDS_LOGITS}add the penalty, {self.term}"
        elif not bool(z.amax() < math.inf):
            seen = NOT_FINITE
        elif not says:
            seen = NOTHING
        else:
            seen = FACTORS if sums else SUMS
            fix += "" if several else OF_AN_ATTACK
        what = "the labels" if self.reads_labels else "the factor"
        return UNREADABLE.format(name=self._name, what=what, seen=seen, fix=fix)

    def skip(self) -> None:
        """Count a batch that got no penalty."""
        self._num_skipped += 1

    def num_skipped(self) -> int:
        """Count the batches that got no penalty, and in whose backward pass no other loss was read. Synchronizes."""
        seen = self._not_counted = _on_host(self._not_counted)
        read_in = {one.backward for one in seen if one.fits and one.backward != -1}  # -1: compiled autograd
        self._num_skipped += sum(one.is_missed and one.backward not in read_in for one in seen)
        self.known = self.known._replace(num_silent=self._num_silent())
        self._not_counted = []
        return self._num_skipped

    def _num_silent(self) -> int:
        """Count the batches that were not read since the last one that was. Synchronizes."""
        number = self.known.num_silent
        self._not_counted = _on_host(self._not_counted)
        for one in self._not_counted:
            if one.fits:
                number = 0
            number += one.is_missed
        return number


def _on_host(seen: list[_Seen]) -> list[_Seen]:
    """The same as numbers of the host, which waits for a device once."""
    num_live = [one.num_live for one in seen if isinstance(one.num_live, Tensor)]
    fits = [one.fits for one in seen if isinstance(one.fits, Tensor)]
    if not fits:
        return seen
    device = fits[-1].device
    columns = [torch.stack([value.to(device) for value in column]).double() for column in (num_live, fits)]
    numbers = iter(torch.stack(columns, 1).tolist())
    return [_Seen(one.backward, *next(numbers)) if isinstance(one.fits, Tensor) else one for one in seen]


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
    return float(torch.linalg.vector_norm(gradient, ord=1, dtype=dtype))


def _sums_to_zero(gradient: Tensor, dim: int, total: float) -> bool:
    if gradient.ndim <= 1:
        return False
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return _total(gradient.sum(dim, dtype=dtype)) <= SUMS_TO_ZERO * total
