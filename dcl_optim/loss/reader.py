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

from dcl_optim._torch import warn, warn_once
from dcl_optim._validation import check_state
from dcl_optim.layout import to_rows
from dcl_optim.loss.cross_entropy import LOG, Form, Reading, arithmetics, examine, read, wide_dtype
from dcl_optim.progress import Forward, Outcome
from dcl_optim.pull import Scale

PATIENCE = 20  # batches in a row that may tell nothing
TRUSTED = 100  # steps after which nothing ends a run whose loss was read: that is dearer than a missing penalty
SAMPLE = 2**20  # logits that the first look takes
SUMS_TO_ZERO = 0.02  # of the absolute values
TERMS = {False: "loss + optimizer.penalty(logits)", True: "loss + optimizer.penalty(logits, labels)"}

UNREADABLE = (
    "{name} cannot read {what} from the loss's gradient, which is not that of a plain softmax cross-entropy over the "
    "model's logits.\n  Seen: {seen}.\n  Fix: {fix}. See docs/losses.md"
)
IN_A_ROW = "{} batches in a row got no penalty: "
NO_CLASSES = "one logit a row, as of binary classification or regression, which has no classes, or no batch dimension"
SUMS = (
    "the gradient's rows do not sum to 0, as of sigmoid outputs, probabilities, regression, hidden states that the "
    "loss takes to the last layer, or another term"
)
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


NO_FORM = {"smoothing": None, "in_float32": True, "error": 0.0}
SAVED = {
    "smoothing": float | None,
    "in_float32": bool,
    "error": float,
    "scale": float | None,
    "class_dim": int | None,
    "num_silent": int,
}


class _Loss(NamedTuple):
    """What is counted of one loss of a forward pass when values may be read.

    Attributes:
        num_live: how many rows have a gradient, or whether any has.
        fits: whether it was read.
    """

    num_live: Tensor | float
    fits: Tensor | float


class _Choice(NamedTuple):
    """A form and a class dimension by which a gradient was read."""

    form: Form
    dim: int
    reading: Reading


class LossReader:
    """Reads one backward pass after another.

    Args:
        name: of the optimizer, for errors.
        reads_labels: whether labels are needed, or the scale alone.

    Attributes:
        class_dim: the dimension of the classes, of logits with more than two; None before it is known.
        not_found: why an output of the model showed no logits.
        num_skipped: forward passes without a penalty, of those that were counted.
    """

    def __init__(self, name: str, reads_labels: bool) -> None:
        self.reads_labels = reads_labels
        self.term = TERMS[reads_labels]
        self.class_dim: int | None = None
        self.not_found = ""
        self.num_skipped = 0
        self._name = name
        self._form: Form | None = None  # of the gradients; None before one is known
        self._scale: Scale | None = None  # the last s that was read
        self._num_silent = 0  # of the last forward passes with a gradient, one after the other, that were not read
        self._said: set[str] = set()
        self._num_said = 0  # unread batches of which the last warning told
        self._not_counted: list[list[_Loss]] = []  # by forward passes

    @property
    def scale(self) -> Scale:
        """The last s that was read, 1 before any was."""
        return 1.0 if self._scale is None else self._scale

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know. Synchronizes."""
        self.count()
        saved = NO_FORM if self._form is None else self._form._asdict()
        scale = None if self._scale is None else float(self._scale)
        return saved | {"scale": scale, "class_dim": self.class_dim, "num_silent": self._num_silent}

    def check_state(self, state: Any) -> None:
        """Raise ValueError if a state does not fit."""
        check_state(state, SAVED, "loss")

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._form = None if state["smoothing"] is None else Form(*(state[name] for name in NO_FORM))
        self._scale = state["scale"]
        self.class_dim = state["class_dim"]
        self._num_silent = state["num_silent"]

    def _dim_of(self, logits: Tensor) -> int | None:
        """The dimension of the classes; None while it is not known."""
        dim = 1 if logits.ndim <= 2 else self.class_dim
        if dim is not None and dim >= max(logits.ndim, 2):
            raise ValueError(
                f"the logits have shape {tuple(logits.shape)}, but the classes were along dimension {dim} before: keep "
                f"their layout, or use the penalty term, {self.term}"
            )
        return dim

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
        z = forward.rows
        last_scale = self._scale
        dtype = wide_dtype(z.dtype)
        if last_scale is not None and not (
            isinstance(last_scale, Tensor) and last_scale.dtype == dtype and last_scale.device == z.device
        ):
            last_scale = torch.as_tensor(last_scale).to(z.device, dtype)
        reading = None
        dim = 1 if gradient.ndim == 2 else self._dim_of(gradient)
        if self._form is not None and dim is not None:
            if dim != forward.class_dim:
                forward.lay_out(dim)
            reading = read(self._form, forward.rows, to_rows(gradient, dim), last_scale, self.reads_labels)
        if reading is None or (forward.may_read and not bool(reading.fits)):
            reading = self._choose(forward, gradient, last_scale)
            if reading is None:
                return None
        self._scale = reading.scale
        if forward.may_read:
            self._note(forward, True, True)
            return reading
        self._note(forward, reading.num_live, reading.fits)
        return reading if self.reads_labels else reading._replace(scale=reading.scale * reading.fits)

    def _note(self, forward: Forward, num_live: Tensor | bool, fits: Tensor | bool) -> None:
        if forward.outcome is Outcome.LEARNED:  # from another loss
            return
        if not forward.losses:
            self._not_counted.append(forward.losses)
        forward.losses.append(_Loss(num_live, fits))

    def _choose(self, forward: Forward, gradient: Tensor, last_scale: Tensor | None) -> Reading | None:
        """Choose form and class dimension, and read."""
        total = _total(gradient)
        if not 0 < total < math.inf:
            self._note_empty(forward, gradient, total)
            return None
        known_dim = self._dim_of(gradient)
        dims = range(1, max(gradient.ndim, 2)) if known_dim is None else [known_dim]
        # Along the classes the gradient of a softmax cross-entropy sums to 0.
        sums = [dim for dim in dims if _sums_to_zero(gradient, dim, total)]
        z, g = _sample(*(to_rows(tensor, (sums or dims)[0]) for tensor in (forward.logits, gradient)))
        evidence = {in_float32: examine(z, g, in_float32) for in_float32 in arithmetics(z)}
        is_softmax = evidence[True].is_softmax
        says = evidence[True].says or z.shape[1] == 1
        fitting: list[_Choice] = []
        for _, form, _ in evidence.values():
            smoothed = self._smoothed_forms(form, says)
            candidates = [(one, dim) for dim in sums for one in smoothed]
            if says:
                candidates += [(Form(LOG), dim) for dim in dims]
            fitting += self._first_that_fits(forward, gradient, candidates, last_scale)
        if not fitting:
            message = self._unreadable(z, is_softmax, says, bool(sums), forward.is_one_of_several)
            self._refuse(forward, message, says)
            return None
        choice = min(fitting, key=lambda one: float(one.reading.rest))
        if is_softmax and choice.form.smoothing != LOG:
            warn_once(self._said, SOFTMAX_TWICE)
        return self._keep(choice, forward)

    def _note_empty(self, forward: Forward, gradient: Tensor, total: float) -> None:
        """Note a gradient that is zero or not finite."""
        if total == 0 and gradient[0].numel() == 1:  # a softmax of one logit is 1
            message = self._unreadable(forward.rows, False, False, False, False)
            warn_once(self._said, f"a batch gets no penalty: {message}")
        elif total != 0 and forward.outcome is Outcome.OPEN:
            self.skip()

    def _smoothed_forms(self, found: Form, says: bool) -> list[Form]:
        """The forms that a gradient may have in the arithmetic of the one that was found, in the order to try them."""
        if says:
            return list(dict.fromkeys((found, Form(0.0, found.in_float32))))
        if self._form is None:
            return []
        return [self._form._replace(in_float32=found.in_float32)]  # whose arithmetic may show once the model fits

    def _keep(self, choice: _Choice, forward: Forward) -> Reading:
        """Read the next batches in this way too."""
        form, dim, reading = choice
        self._form = form
        self.class_dim = dim if len(forward.shape) > 2 else None
        if dim != forward.class_dim:
            forward.lay_out(dim)
        return reading

    def _first_that_fits(
        self, forward: Forward, gradient: Tensor, forms: list[tuple[Form, int]], last_scale: Tensor | None
    ) -> list[_Choice]:
        """The first pair of a form and a class dimension by which the gradient is read, or none."""
        for form, dim in forms:
            rows = to_rows(forward.logits, dim)
            reading = read(form, rows, to_rows(gradient, dim), last_scale, self.reads_labels)
            if bool(reading.fits):
                return [_Choice(form, dim, reading)]
        return []

    def _refuse(self, forward: Forward, message: str, says: bool) -> None:
        """A gradient has no known form: an error if none was known before, or of many in a row; else a warning."""
        is_known = self._form is not None
        is_long = is_known and forward.step_number > TRUSTED
        if says and not is_known:
            raise RuntimeError(message)
        self._note(forward, True, False)
        may_end = (says or not is_known) and not is_long  # a model may be certain for good
        if may_end and self._count_silent(_on_host(self._not_counted)) >= PATIENCE:
            raise RuntimeError(IN_A_ROW.format(PATIENCE) + message if is_known else message)
        # Else the batch may say nothing by chance, or these logits have their penalty from another loss.
        if forward.outcome is Outcome.OPEN and (is_known or forward.is_one_of_several):
            self._warn(message, again=is_long)

    def _warn(self, message: str, again: bool) -> None:
        """Tell of unread batches, once, and in a long run again each time that their number has doubled."""
        number = self.num_skipped + sum(map(_is_missed, self._not_counted))
        if not self._num_said:
            warn(f"a batch gets no penalty: {message}")
        elif again and number >= 2 * self._num_said:
            warn(f"a batch gets no penalty, {number} so far: {message}")
        else:
            return
        self._num_said = number

    def _unreadable(self, z: Tensor, is_softmax: bool, says: bool, sums: bool, several: bool) -> str:
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
        """Note a batch that got no penalty."""
        self.num_skipped += 1

    def count(self) -> None:
        """Count the forward passes without a penalty of those that were noted. Synchronizes.

        One of whose losses one was read has its penalty from that.
        """
        losses = _on_host(self._not_counted)
        self.num_skipped += sum(map(_is_missed, losses))
        self._num_silent = self._count_silent(losses)
        for counted in self._not_counted:
            counted.clear()
        self._not_counted = []

    def _count_silent(self, losses: list[list[_Loss]]) -> int:
        """The number of forward passes since the last one that was read, with those that are not counted yet."""
        number = self._num_silent
        for of_pass in losses:
            if any(one.fits for one in of_pass):
                number = 0
            number += _is_missed(of_pass)
        return number


def _is_missed(losses: list[_Loss]) -> bool:
    """Whether there was a loss to read of a forward pass, and none was read."""
    return any(bool(one.num_live) for one in losses) and not any(one.fits for one in losses)


def _on_host(losses: list[list[_Loss]]) -> list[list[_Loss]]:
    """The same as numbers of the host, which waits for a device once."""
    on_device = [one for of_pass in losses for one in of_pass if isinstance(one.fits, Tensor)]
    if not on_device:
        return losses
    device = torch.as_tensor(on_device[-1].fits).device
    columns = [
        torch.stack([torch.as_tensor(value, device=device) for value in column]).float()
        for column in zip(*on_device, strict=True)
    ]
    numbers = iter(torch.stack(columns, 1).tolist())
    return [[_Loss(*next(numbers)) if isinstance(one.fits, Tensor) else one for one in of_pass] for of_pass in losses]


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
