r"""What the line reads off each backward pass: loss scale, labels and class dimension.

They are those of a softmax cross-entropy (:mod:`dcl_optim.loss.cross_entropy`), or are not read at all: then the
penalty term, ``loss + optimizer.penalty(...)``, is the way. The form of the gradient is chosen at the first gradient
that tells it, and again when a batch does not fit, in the next step in which values may be read.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim import _sync
from dcl_optim._torch import warn_once
from dcl_optim._validation import is_number
from dcl_optim.distances import to_rows
from dcl_optim.loss import cross_entropy, unread
from dcl_optim.loss.cross_entropy import Evidence, Form, Gradient, Reading
from dcl_optim.step import Forward

Scale = float | Tensor
PATIENCE = 20  # batches that may tell nothing before the first one that does


class Labels(NamedTuple):
    """The labels of one batch.

    Attributes:
        rows: the label of each row (N,), K for none; or soft labels (N, K), 0 in rows without.
        number: the number of rows that have one.
    """

    rows: Tensor
    number: float | Tensor


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


class LossReader:
    """Reads one backward pass after another.

    Args:
        name: of the optimizer, for errors.
        reads_labels: whether labels are needed, or the scale alone.
    """

    def __init__(self, name: str, reads_labels: bool) -> None:
        self._name = name
        self.reads_labels = reads_labels
        self._said: set[str] = set()
        self.skipped = unread.Skipped()
        self.load_state({})

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know, in types that ``torch.load(weights_only=True)`` reads. Synchronizes."""
        form = None if self._form is None else f"{self._form.kind} {self._form.smoothing!r}"
        scale = None if self._scale is None else float(self._scale)
        return {"form": form, "scale": scale, "class_dim": self.class_dim, "num_silent": self._num_silent}

    def check_state(self, state: Any) -> None:
        """Raise ValueError if a state does not fit, before anything is changed."""
        try:
            form = "hard 0.0" if state["form"] is None else state["form"]
            kind, _, smoothing = form.partition(" ")
            fits = kind in ("hard", "weighted", "soft", "log") and 0.0 <= float(smoothing) < 1.0
            scale = state["scale"]
            fits = fits and (scale is None or (is_number(scale) and math.isfinite(scale)))
            dim = state["class_dim"]
            fits = fits and (dim is None or _is_count(dim))
            fits = fits and _is_count(state["num_silent"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"the state of the loss does not fit: {state!r}")

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; an empty one is that before the first batch."""
        kind, _, smoothing = (state.get("form") or "").partition(" ")
        self._form = Form(kind, float(smoothing)) if kind else None  # type: ignore[arg-type]
        self._scale: Scale | None = state.get("scale")  # the last one that was read
        self.class_dim: int | None = state.get("class_dim")
        self._num_silent: int = state.get("num_silent", 0)  # batches with a gradient that told no form

    def read(self, forward: Forward, gradient: Tensor) -> Loss:
        """Read the gradient of the logits, and lay them out as rows.

        Args:
            forward: the forward pass.
            gradient: of its logits.
        """
        if not gradient.numel():  # a batch without rows says nothing
            return Loss(self._last_scale())
        dim = self.dim_of(gradient)
        reading: Reading | None = None
        is_finite = True
        may_read = True  # until the form is known
        if self._form is not None and dim is not None:
            may_read = _sync.may_sync(forward.step, gradient)
            forward.lay_out(dim)
            seen = _gradient_rows(forward.rows, to_rows(gradient, dim), self._form)
            reading = cross_entropy.read(self._form, seen, self.reads_labels)
        if may_read and (reading is None or not bool(reading.fits)):
            reading, is_finite = self._choose(forward, gradient)
        if not forward.observed:
            self._note_whether_read(reading, may_read)
        return self._loss_of(reading, is_finite)

    def dim_of(self, logits: Tensor) -> int | None:
        """The dimension of the classes; None while it is not known."""
        if logits.ndim <= 2:
            return 1
        if self.class_dim is not None and self.class_dim >= logits.ndim:
            raise ValueError(
                f"the logits have shape {tuple(logits.shape)}, but the classes were along dimension {self.class_dim} "
                f"before: keep their layout, or use the penalty term, {unread.term_of(self.reads_labels)}"
            )
        return self.class_dim

    def _note_whether_read(self, reading: Reading | None, may_read: bool) -> None:
        if reading is None or may_read:  # then it fits, since another form was looked for
            self.skipped.add(reading is not None)
        else:
            self.skipped.add(reading.fits)

    def _loss_of(self, reading: Reading | None, is_finite: bool) -> Loss:
        last = self._last_scale()
        if reading is None:
            return Loss(last, None, None, is_finite)
        if not isinstance(last, Tensor):
            last = torch.full_like(reading.scale, last)
        self._scale = scale = torch.where(reading.tells_scale, reading.scale, last.to(reading.scale))
        if self.reads_labels:
            return Loss(scale, Labels(reading.labels, reading.num_live * reading.fits), reading.fits)
        return Loss(scale * reading.fits, None, reading.fits)

    def _last_scale(self) -> Scale:
        return 1.0 if self._scale is None else self._scale

    def _choose(self, forward: Forward, gradient: Tensor) -> tuple[Reading | None, bool]:
        """Choose form and class dimension, and read; say also whether the gradient is finite."""
        dims = self._possible_dims(gradient)
        layouts = [_gradient_rows(to_rows(forward.logits, dim), to_rows(gradient, dim), None) for dim in dims]
        vectors = [cross_entropy.examine(layout) for layout in layouts]
        found = [Evidence(*numbers) for numbers in torch.stack(vectors).tolist()]  # one wait for all
        if not 0 < found[0].total < math.inf:
            return None, found[0].total == 0  # one of zero says that this batch has the factor 0
        trials = [
            (rank, form, dim, layout, evidence)
            for dim, layout, evidence in zip(dims, layouts, found, strict=True)
            for rank, form in cross_entropy.candidates(evidence, layout.z.shape[1], self._form)
        ]
        for _, form, dim, layout, evidence in sorted(trials, key=itemgetter(0)):
            reading = cross_entropy.read(form, layout, self.reads_labels)
            if bool(reading.fits):
                if evidence.is_softmax and form.kind != "log":
                    warn_once(self._said, unread.SOFTMAX_TWICE)
                self._take(form, dim, forward)
                return reading, True
        tells_a_form = all(evidence.says for evidence in found)  # else one that says nothing may be that of the classes
        self._num_silent += 1
        if tells_a_form or self._form is not None or self._num_silent >= PATIENCE:
            self._refuse(list(zip(layouts, found, strict=True)), forward)
        return None, True

    def _possible_dims(self, gradient: Tensor) -> list[int]:
        known = self.dim_of(gradient)
        if known is not None:
            return [known]
        return [dim for dim in range(1, gradient.ndim) if gradient.shape[dim] > 1] or [1]

    def _take(self, form: Form, dim: int, forward: Forward) -> None:
        self._form = form
        self._num_silent = 0
        if forward.logits.ndim > 2:
            self.class_dim = dim
        forward.lay_out(dim)

    def _refuse(self, seen: list[tuple[Gradient, Evidence]], forward: Forward) -> None:
        """A gradient has no known form: an error, or a warning once a form is known."""
        message = unread.unreadable(self._name, seen, self.reads_labels)
        if self._form is None:
            raise RuntimeError(message)
        if not forward.observed:  # else these logits have their penalty from another loss
            warn_once(self._said, f"a batch gets no penalty: {message}", "a batch")

    def questions(self) -> list[_sync.Question]:
        """What is asked together in a step that may read values: how many of the last batches were skipped."""
        return self.skipped.questions(self._warn_of_many)

    def _warn_of_many(self) -> None:
        number, window = self.skipped.recent()
        if window == unread.WINDOW and 2 * number > window:
            term = unread.term_of(self.reads_labels)
            message = unread.MANY_SKIPPED.format(name=self._name, number=number, window=window, term=term)
            warn_once(self._said, message, "many batches")


def _is_count(value: Any) -> bool:
    return is_number(value) and value == abs(int(value))


def _gradient_rows(z: Tensor, g: Tensor, form: Form | None) -> Gradient:
    """Rows of logits and gradient, with what is known of them: all, since a choice of them may show another factor.

    A live row, whose gradient is not zero, has a positive entry, since it sums to 0, except of ``NLLLoss``.
    """
    size = g.abs().amax(1) if form is None or form.kind == "log" else g.amax(1)
    # The number of rows that are not zero: the norm of order 0 takes one kernel.
    num_live = torch.linalg.vector_norm(size, 0, dtype=torch.promote_types(g.dtype, torch.float32))
    return Gradient(z, g, size > 0, num_live, cross_entropy.tolerance_of(z.dtype, g.dtype))
