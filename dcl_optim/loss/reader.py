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
        shown: s as this gradient shows it, not finite if the gradient is not; None if it was not read.
        is_finite: False if the gradient is known not to be finite.
    """

    scale: Scale
    labels: Labels | None = None
    shown: Tensor | None = None
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
        undecided = [self._num_silent, self._may_be_hard, self._single_row_scale, self._was_refused]
        return {"form": form, "scale": scale, "class_dim": self.class_dim, "undecided": undecided}

    def check_state(self, state: Any) -> None:
        """Raise ValueError if a state does not fit, before anything is changed."""
        try:
            form = "hard 0.0" if state["form"] is None else state["form"]
            kind, _, smoothing = form.partition(" ")
            fits = kind in ("hard", "weighted", "soft", "log") and 0.0 <= float(smoothing) < 1.0
            scale = state["scale"]
            fits = fits and (scale is None or (is_number(scale) and math.isfinite(scale)))
            dim = state["class_dim"]
            fits = fits and (dim is None or (is_number(dim) and dim == abs(int(dim))))
            num_silent, _, single_row_scale, _ = state["undecided"]
            fits = fits and is_number(num_silent) and (single_row_scale is None or is_number(single_row_scale))
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
        self._wait_anew(*state.get("undecided", ()))

    def read(self, forward: Forward, gradient: Tensor, is_first: bool) -> Loss:
        """Read the gradient of the logits, and lay them out as rows.

        Args:
            forward: the forward pass.
            gradient: of its logits.
            is_first: whether this is the first backward pass of the step.
        """
        if not gradient.numel():  # a batch without rows says nothing
            return Loss(self._last_scale())
        may_read = _sync.may_sync(forward.step, gradient)
        dim = self.dim_of(gradient)
        if self._form is None:
            self._num_silent += 1
        reading: Reading | None = None
        is_finite = True
        if self._form is not None and dim is not None:
            forward.lay_out(dim)
            seen = _gradient_rows(forward.rows, to_rows(gradient, dim), self._form)
            reading = cross_entropy.read(self._form, seen, self.reads_labels)
            chooses = may_read and not bool(reading.fits)
        else:
            chooses = may_read and self._tries_again(forward.step)
        if chooses:
            reading, is_finite = self._choose(forward, gradient)
        if self.reads_labels and not forward.observed:
            self._note_whether_read(reading, may_read)
        return self._loss_of(reading, is_finite, gradient, is_first)

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

    def _tries_again(self, step: int) -> bool:
        """Whether a gradient whose form is not known is examined; a loss that is no cross-entropy mostly stays so."""
        return not self._was_refused or step % _sync.SYNC_INTERVAL == 0

    def _note_whether_read(self, reading: Reading | None, may_read: bool) -> None:
        if reading is None or may_read:  # then it fits, since another form was looked for
            self.skipped.add(reading is not None)
        else:
            self.skipped.add(reading.fits)

    def _loss_of(self, reading: Reading | None, is_finite: bool, gradient: Tensor, is_first: bool) -> Loss:
        last = self._last_scale()
        if reading is None:
            if not self.reads_labels and is_finite and self._scale is None:
                self._require_a_scale(gradient, is_first)
            return Loss(last, None, None, is_finite)
        if not isinstance(last, Tensor):
            last = torch.full_like(reading.scale, last)
        self._scale = scale = torch.where(reading.tells_scale, reading.scale, last.to(reading.scale))
        if self.reads_labels:
            return Loss(scale, Labels(reading.labels, reading.num_live), reading.scale)
        return Loss(
            scale * (reading.num_live > 0), None, reading.scale
        )  # a gradient of zero: the loss has the factor 0

    def _last_scale(self) -> Scale:
        return 1.0 if self._scale is None else self._scale

    def _require_a_scale(self, gradient: Tensor, is_first: bool) -> None:
        """Refuse to take 1 for a scale that is likely another one: a gradient scaler's, or that of accumulation."""
        if self._was_refused and (gradient.dtype == torch.float16 or not is_first):
            raise RuntimeError(unread.UNREADABLE_SCALE.format(name=self._name))

    def _choose(self, forward: Forward, gradient: Tensor) -> tuple[Reading | None, bool]:
        """Choose form and class dimension, and read; say also whether the gradient is finite."""
        dims = self._possible_dims(gradient)
        layouts = [_gradient_rows(to_rows(forward.logits, dim), to_rows(gradient, dim), None) for dim in dims]
        vectors = [cross_entropy.examine(layout) for layout in layouts]
        found = [Evidence(*numbers) for numbers in torch.stack(vectors).tolist()]  # one wait for all
        if not 0 < found[0].total < math.inf:
            return self._no_gradient(found[0].total, layouts[0], self.dim_of(gradient) is not None)
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
        if all(evidence.says for evidence in found):  # else the one that says nothing yet may be that of the classes
            return self._refuse(layouts[0], forward)
        return self._wait(forward, dims, layouts[0], found[0])

    def _possible_dims(self, gradient: Tensor) -> list[int]:
        known = self.dim_of(gradient)
        if known is not None:
            return [known]
        return [dim for dim in range(1, gradient.ndim) if gradient.shape[dim] > 1] or [1]

    def _wait_anew(
        self,
        num_silent: int = 0,
        may_be_hard: bool = True,
        single_row_scale: float | None = None,
        was_refused: bool = False,
    ) -> None:
        """What batches have shown as long as the form is not known.

        Args:
            num_silent: their number.
            may_be_hard: whether each of them fits hard labels.
            single_row_scale: what the first of them with a single row would have.
            was_refused: whether a gradient that said something had no known form.
        """
        self._num_silent = num_silent
        self._may_be_hard = may_be_hard
        self._single_row_scale = single_row_scale
        self._was_refused = was_refused

    def _take(self, form: Form, dim: int, forward: Forward) -> None:
        self._form = form
        self._wait_anew()
        if forward.logits.ndim > 2:
            self.class_dim = dim
        forward.lay_out(dim)

    def _no_gradient(self, total: float, layout: Gradient, knows_dim: bool) -> tuple[Reading | None, bool]:
        """A gradient of zero says that the loss has the factor 0; one that is not finite says nothing."""
        if total != 0:
            return None, False
        if self.reads_labels and not knows_dim:  # the number of classes is not known either
            return None, True
        zero = torch.zeros((), device=layout.g.device)
        none = torch.full((len(layout.g),), layout.g.shape[1], device=layout.g.device)
        return Reading(none, zero, zero == 0, zero == 0, layout.num_live), True

    def _wait(
        self, forward: Forward, dims: list[int], layout: Gradient, evidence: Evidence
    ) -> tuple[Reading | None, bool]:
        """A batch tells no form: one row of two classes, or a model that is certain of all rows.

        If hard labels fit each of the first such batches, they are taken; what does not fit is refused.
        """
        if self._form is not None:
            return self._refuse(layout, forward)
        reading = cross_entropy.read(Form("hard"), layout, self.reads_labels)
        fits = len(dims) == 1 and bool(evidence.is_hard) and not evidence.is_mixed
        self._may_be_hard = self._may_be_hard and fits and self._has_one_scale(reading, layout.tolerance)
        is_over = self._num_silent >= PATIENCE
        if not self._may_be_hard:
            self._scale = None  # that of hard labels, which do not fit
            return self._refuse(layout, forward) if is_over else (None, True)
        if is_over:
            self._take(Form("hard"), dims[0], forward)
        elif self.reads_labels:
            return None, True
        # Before it is over: the scale that hard labels would have is likelier than 1.
        return reading, True

    def _has_one_scale(self, reading: Reading, tolerance: float) -> bool:
        """Whether the batches of a single row show one scale: of two classes hard labels fit any such row."""
        num_live, tells_scale, scale = torch.stack([reading.num_live, reading.tells_scale, reading.scale]).tolist()
        if num_live != 1 or not tells_scale:
            return True
        if self._single_row_scale is None:
            self._single_row_scale = scale
        return abs(scale - self._single_row_scale) <= 5.0 * tolerance * self._single_row_scale

    def _refuse(self, layout: Gradient, forward: Forward) -> tuple[None, bool]:
        """A gradient that says something has no known form: an error where labels are needed, later a warning."""
        self._was_refused = self._form is None
        if self.reads_labels:
            message = unread.unreadable_labels(self._name, layout.g)
            if self._form is None:
                raise RuntimeError(message)
            if not forward.observed:  # else these logits have their penalty from another loss
                warn_once(self._said, f"a batch gets no penalty: {message}", "a batch")
        return None, True

    def questions(self) -> list[_sync.Question]:
        """What is asked together in a step that may read values: how many of the last batches were skipped."""
        return self.skipped.questions(self._warn_of_many)

    def _warn_of_many(self) -> None:
        number, window = self.skipped.recent()
        if window == unread.WINDOW and 2 * number > window:
            message = unread.MANY_SKIPPED.format(name=self._name, number=number, window=window)
            warn_once(self._said, message, "many batches")


def _gradient_rows(z: Tensor, g: Tensor, form: Form | None) -> Gradient:
    """Rows of logits and gradient, with what is known of them: all, since a choice of them may show another factor.

    A live row, whose gradient is not zero, has a positive entry, since it sums to 0, except of ``NLLLoss``.
    """
    size = g.abs().amax(1) if form is None or form.kind == "log" else g.amax(1)
    # The number of rows that are not zero: the norm of order 0 takes one kernel.
    num_live = torch.linalg.vector_norm(size, 0, dtype=torch.promote_types(g.dtype, torch.float32))
    return Gradient(z, g, size > 0, num_live, cross_entropy.tolerance_of(z.dtype, g.dtype))
