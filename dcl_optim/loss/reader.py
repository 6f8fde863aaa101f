r"""What the line reads off each backward pass: the factor on the loss, labels and class dimension.

They are those of a plain softmax cross-entropy (:mod:`dcl_optim.loss.cross_entropy`), or are not read at all: then the
term, ``loss + optimizer.penalty(...)``, is the way. The form of the gradient is chosen at the first gradient
that tells it, and again when a batch does not fit, in the next step in which values may be read. A reader never raises
and never warns: it says in its attributes why a gradient was not read, and counts it.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from dcl_optim.loss.cross_entropy import (
    Form,
    Reading,
    best,
    choices,
    each_row_fits,
    is_beyond_doubt,
    read,
    tells_form,
    wide_dtype,
    with_each_softmax,
)
from dcl_optim.penalty.layout import to_rows
from dcl_optim.penalty.pull import Scale
from dcl_optim.progress import Forward, Outcome

PATIENCE = 20  # first batches of which the model may be certain
SAMPLE = 2**20  # logits that the first look takes
SAVED = {
    "smoothing": float | None,
    "in_float32": bool,
    "classes_last": bool,
    "scale": float | None,
    "class_dim": int | None,
}
SUMS_TO_ZERO = 0.02  # of the absolute values


class Unread(Enum):
    """Why a gradient was not read."""

    NO_CLASSES = auto()  # a row has one logit
    SUMS = auto()  # along no dimension its rows sum to 0
    FACTORS = auto()  # it has no form that is known
    NOTHING = auto()  # it tells no form
    ROUNDING = auto()  # nor would it with any other, as that of a model that is certain and right


class LossReader:
    """Reads one backward pass after another.

    Args:
        reads_labels: whether labels are needed, or the factor alone.

    Attributes:
        form: of the gradients; None before one is known.
        class_dim: the dimension of the classes, of logits with more than two; None before it is known.
        scale: the last s that was read; None before one was.
        unread: why the last gradient was not read; None if it was, or if it is zero or not finite.
        is_certain: whether the form was chosen from batches of which the model is certain.
        num_skipped: gradients that were not read, of those that were counted.
        not_counted: of others, whether they have labels, and whether they were read, on the device.
    """

    def __init__(self, reads_labels: bool) -> None:
        self.reads_labels = reads_labels
        self.form: Form | None = None
        self.class_dim: int | None = None
        self.scale: Scale | None = None
        self.unread: Unread | None = None
        self.is_certain = False
        self.num_skipped = 0
        # Of each of the first batches, if the model is certain of them and they have a plain form: is it beyond doubt?
        self._certain: list[bool] = []
        self.not_counted: list[tuple[Tensor, Tensor]] = []

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know. Synchronizes."""
        form = self.form or Form(0.0)
        scale = None if self.scale is None else float(self.scale)
        smoothing = self.form and form.smoothing
        return form._asdict() | {"smoothing": smoothing, "scale": scale, "class_dim": self.class_dim}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        form = Form(*(state[field] for field in Form._fields))
        self.form = None if form.smoothing is None else form
        self.scale = state["scale"]
        self.class_dim = state["class_dim"]

    def read(self, forward: Forward, gradient: Tensor) -> Reading | None:
        """Read the gradient of the logits, and lay them out as rows.

        Without labels the scale of the reading is 0 if the gradient does not have the known form, which a device does
        not say before values may be read.

        Args:
            forward: the forward pass.
            gradient: of its logits.

        Returns:
            None for a gradient that is zero or not finite, that tells nothing, or that has no known form.
        """
        self.unread = None
        if not gradient.numel():  # a batch without rows says nothing
            return None
        reading = None
        dim = 1 if gradient.ndim <= 2 else self.class_dim
        if self.form is not None and dim is not None:
            reading = self._read_by(self.form, forward, gradient, dim, self.scale)
        if reading is None or (forward.may_read and not bool(reading.fits)):
            reading = self._choose(forward, gradient, dim)
            if reading is None:
                return None
        elif not forward.may_read:
            self.not_counted.append((reading.num_live, reading.fits))
            if not self.reads_labels:
                reading = reading._replace(scale=reading.scale * reading.fits)
        self.scale = reading.scale
        return reading

    def _read_by(self, form: Form, forward: Forward, gradient: Tensor, dim: int, last: Scale | None) -> Reading:
        if dim != forward.class_dim:
            forward.lay_out(dim)
        z = forward.rows
        if last is not None:
            last = torch.as_tensor(last, dtype=wide_dtype(z.dtype), device=z.device)
        return read(form, z, to_rows(gradient, dim), last, self.reads_labels)

    def _choose(self, forward: Forward, gradient: Tensor, known_dim: int | None) -> Reading | None:
        """Choose form and class dimension, and read; else note why the gradient is not read."""
        total = _total(gradient)
        is_counted = forward.outcome is Outcome.OPEN  # else these logits have their penalty from another loss
        if not 0 < total < math.inf:
            self.num_skipped += total != 0 and is_counted
            return None
        dims = range(1, max(gradient.ndim, 2)) if known_dim is None else (known_dim,)
        sums = {dim: _total_of_sums(gradient, dim) / total for dim in dims}
        order = sorted(dims, key=sums.__getitem__)  # along the classes the gradient of a softmax sums to 0
        for dim in order:
            reading = self._choose_along(dim, forward, gradient, dim == order[0])
            if reading is not None:
                self.class_dim = dim if gradient.ndim > 2 else None
                self.unread = None  # as a likelier dimension may have left it
                return reading
        self.unread = self.unread or _why(*_sample(forward.logits, gradient, order[0]), sums[order[0]])
        self.num_skipped += is_counted
        return None

    def _choose_along(self, dim: int, forward: Forward, gradient: Tensor, is_likeliest: bool) -> Reading | None:
        """Choose a form of the rows along a dimension, and read by it; None if there is none."""
        z, g = _sample(forward.logits, gradient, dim)
        tells = tells_form(z, g)
        if not tells and not is_likeliest:
            return None
        # The arithmetic of the known form may show once the model fits.
        forms = choices(z, g) if tells or self.form is None else with_each_softmax(self.form.smoothing, z)
        readings = {form: self._read_by(form, forward, gradient, dim, None) for form in forms}
        form = best(readings)
        if form is None:
            self._certain = []
            return None
        if self.form is None and not tells:
            self._look_at_certain(form, readings[form], z, g)
            if not self.is_certain:
                return None
        self.form = form
        return readings[form]

    def _look_at_certain(self, form: Form, reading: Reading, z: Tensor, g: Tensor) -> None:
        """Note whether the first batches, of which the model is certain, show a form beyond doubt; else why not."""
        if not bool(reading.told):
            self.unread = Unread.ROUNDING
            return
        self._certain.append(is_beyond_doubt(form, z, g))
        self.is_certain = any(self._certain) and (len(self._certain) >= PATIENCE or each_row_fits(form, z, g))
        self.unread = Unread.NOTHING

    def count(self) -> None:
        """Count the unread gradients of those that were noted. Synchronizes."""
        if self.not_counted:
            num_live, fits = map(torch.stack, zip(*self.not_counted, strict=True))
            self.num_skipped += int(((num_live > 0) & ~fits).sum())
            self.not_counted = []


def _why(z: Tensor, g: Tensor, sums: float) -> Unread:
    """Why rows have no form, whose sums are this share of their absolute values."""
    if z.shape[1] == 1:
        return Unread.NO_CLASSES
    if sums > SUMS_TO_ZERO:
        return Unread.SUMS
    return Unread.FACTORS if tells_form(z, g) else Unread.NOTHING


def _sample(z: Tensor, gradient: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Rows that have a gradient, at most SAMPLE numbers of them."""
    g = to_rows(gradient, dim)
    rows = g.any(1).nonzero().flatten()
    rows = rows[:: -(-len(rows) * g.shape[1] // SAMPLE)]
    return to_rows(z, dim)[rows], g[rows]


def _total(gradient: Tensor) -> float:
    """The sum of absolute values, which synchronizes."""
    dtype = wide_dtype(gradient.dtype)
    return float(gradient.abs().sum(dtype=dtype))  # a CPU's 1-norm in float32 adds up in one number, off by half


def _total_of_sums(gradient: Tensor, dim: int) -> float:
    """The same of the sums along a dimension."""
    return _total(gradient.sum(dim, dtype=wide_dtype(gradient.dtype)) if gradient.ndim > 1 else gradient)
