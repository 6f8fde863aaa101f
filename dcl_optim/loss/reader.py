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
from dcl_optim._torch import warn
from dcl_optim._validation import is_number
from dcl_optim.distances import to_rows, wide
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
        self._warned: set[str] = set()
        self.skipped = unread.Skipped()
        self.load_state({})

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know, in types that ``torch.load(weights_only=True)`` reads. Synchronizes."""
        form = None if self._form is None else f"{self._form.kind} {self._form.smoothing!r}"
        scale = None if self._scale is None else float(self._scale)
        return {"form": form, "scale": scale, "class_dim": self.class_dim}

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
        self._num_silent = 0  # batches before the first one that told a form
        self._may_be_hard = True  # whether each of them fits hard labels
        self._was_refused = False  # whether a gradient that said something had no known form

    def read(self, forward: Forward, gradient: Tensor, is_first: bool) -> Loss:
        """Read the gradient of the logits, and lay them out as rows.

        Args:
            forward: the forward pass.
            gradient: of its logits.
            is_first: whether this is the first backward pass of the step.
        """
        may_read = _sync.may_sync(forward.step, gradient)
        dim = self.dim_of(gradient)
        if self._form is None:
            self._num_silent += 1
        if self._form is not None and dim is not None:
            forward.lay_out(dim)
            seen = _LaidOut(forward.rows, to_rows(gradient, dim), dim, self._form)
            reading: Reading | None = cross_entropy.read(self._form, seen.gradient(), self.reads_labels)
            count = seen.count
            if may_read and reading is not None and not bool(reading.fits):
                reading, count, is_finite = self._choose(forward, gradient)
            else:
                is_finite = True
        elif may_read and self._tries_again(forward.step):
            reading, count, is_finite = self._choose(forward, gradient)
        else:
            reading, count, is_finite = None, None, True
        if self.reads_labels:
            self._note_whether_read(reading, may_read)
        return self._loss_of(reading, count, is_finite, forward, gradient, is_first)

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

    def _loss_of(
        self,
        reading: Reading | None,
        count: Tensor | None,
        is_finite: bool,
        forward: Forward,
        gradient: Tensor,
        is_first: bool,
    ) -> Loss:
        last = 1.0 if self._scale is None else self._scale
        if reading is None or count is None:
            forward.lay_out(self.dim_of(gradient) or 1)
            if not self.reads_labels and is_finite and self._scale is None:
                self._require_a_scale(gradient, is_first)
            return Loss(last, None, None, is_finite)
        if not isinstance(last, Tensor):
            last = torch.full_like(reading.scale, last)
        self._scale = scale = torch.where(reading.tells_scale, reading.scale, last.to(reading.scale))
        if self.reads_labels:
            return Loss(scale, Labels(reading.labels, count), reading.scale)
        return Loss(scale * (count > 0), None, reading.scale)  # a gradient of zero: the loss has the factor 0

    def _require_a_scale(self, gradient: Tensor, is_first: bool) -> None:
        """Refuse to take 1 for a scale that is likely another one: a gradient scaler's, or that of accumulation."""
        if self._was_refused and (gradient.dtype == torch.float16 or not is_first):
            raise RuntimeError(unread.UNREADABLE_SCALE.format(name=self._name))

    def _choose(self, forward: Forward, gradient: Tensor) -> tuple[Reading | None, Tensor | None, bool]:
        """Choose form and class dimension from all rows, and read: the reading, the number of live rows, is_finite."""
        known = self.dim_of(gradient)
        dims = [known]
        if known is None:
            dims = [dim for dim in range(1, gradient.ndim) if gradient.shape[dim] > 1] or [1]
        layouts = [
            _LaidOut(to_rows(forward.logits, dim), to_rows(gradient, dim), dim, None) for dim in dims if dim is not None
        ]
        if not len(layouts[0].g):
            return None, None, True
        vectors = [cross_entropy.examine(layout.gradient()) for layout in layouts]
        found = [Evidence(*numbers) for numbers in torch.stack(vectors).tolist()]  # one wait for all
        if not 0 < found[0].total < math.inf:
            return self._no_gradient(found[0].total, layouts[0], known is not None)
        trials = [
            (rank, form, layout, evidence)
            for layout, evidence in zip(layouts, found, strict=True)
            for rank, form in cross_entropy.candidates(evidence, layout.z.shape[1], self._form)
        ]
        for _, form, layout, evidence in sorted(trials, key=itemgetter(0)):
            reading = cross_entropy.read(form, layout.gradient(), self.reads_labels)
            if bool(reading.fits):
                if evidence.is_softmax and form.kind != "log":
                    self._warn(unread.SOFTMAX_TWICE)
                return self._take(form, layout, forward, reading)
        if all(evidence.says for evidence in found):  # else the one that says nothing yet may be that of the classes
            return self._refuse(forward, layouts[0])
        return self._wait(forward, layouts, found)

    def _take(self, form: Form, layout: _LaidOut, forward: Forward, reading: Reading) -> tuple[Reading, Tensor, bool]:
        self._form = form
        self._was_refused = False
        if forward.logits.ndim > 2:
            self.class_dim = layout.dim
        forward.lay_out(layout.dim)
        return reading, layout.count, True

    def _no_gradient(
        self, total: float, layout: _LaidOut, knows_dim: bool
    ) -> tuple[Reading | None, Tensor | None, bool]:
        """A gradient of zero says that the loss has the factor 0; one that is not finite says nothing."""
        if total != 0:
            return None, None, False
        if self.reads_labels and not knows_dim:  # the number of classes is not known either
            return None, None, True
        zero = torch.zeros((), device=layout.g.device)
        none = torch.full((len(layout.g),), layout.g.shape[1], device=layout.g.device)
        return Reading(none, zero, zero == 0, zero == 0), layout.count, True

    def _wait(
        self, forward: Forward, layouts: list[_LaidOut], found: list[Evidence]
    ) -> tuple[Reading | None, Tensor | None, bool]:
        """A batch tells no form: one row of two classes, or a model that is certain of all rows.

        If hard labels fit each of the first such batches, they are taken; what does not fit is refused.
        """
        if self._form is not None:
            return self._refuse(forward, layouts[0])
        evidence = found[0]
        self._may_be_hard = self._may_be_hard and len(found) == 1 and bool(evidence.is_hard) and not evidence.is_mixed
        is_over = self._num_silent >= PATIENCE
        if not self._may_be_hard:
            return self._refuse(forward, layouts[0]) if is_over else (None, None, True)
        if not is_over and self.reads_labels:
            return None, None, True
        reading = cross_entropy.read(Form("hard"), layouts[0].gradient(), self.reads_labels)
        if is_over:
            return self._take(Form("hard"), layouts[0], forward, reading)
        return reading, layouts[0].count, True  # the scale that hard labels would have is likelier than 1

    def _refuse(self, forward: Forward, layout: _LaidOut) -> tuple[None, None, bool]:
        """A gradient that says something has no known form: an error where labels are needed, later a warning."""
        self._was_refused = self._form is None
        if self.reads_labels:
            message = unread.UNREADABLE_LABELS.format(name=self._name, seen=unread.seen_in(layout.z, layout.g))
            if self._form is None:
                raise RuntimeError(message)
            self._warn(f"a batch gets no penalty: {message}", "a batch")
        return None, None, True

    def questions(self) -> list[_sync.Question]:
        """What is asked together in a step that may read values: how many of the last batches were skipped."""
        return self.skipped.questions(self._warn_of_many)

    def _warn_of_many(self) -> None:
        number, window = self.skipped.recent()
        if window == unread.WINDOW and 2 * number > window:
            message = unread.MANY_SKIPPED.format(name=self._name, number=number, window=window)
            self._warn(message, "many batches")

    def _warn(self, message: str, about: str = "") -> None:
        """Warn once about something."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            warn(message)


class _LaidOut:
    """A gradient as rows along one dimension.

    A live row, whose gradient is not zero, has a positive entry, since it sums to 0, except of ``NLLLoss``.
    """

    def __init__(self, z: Tensor, g: Tensor, dim: int, form: Form | None) -> None:
        self.dim = dim
        self.z = z
        self.g = g
        self._tolerance = cross_entropy.tolerance_of(self.z.dtype, self.g.dtype)
        if form is None or form.kind == "log":
            self._size = self.g.abs().amax(1)
        else:
            self._size = self.g.amax(1)
        # The number of rows that are not zero: the norm of order 0 takes one kernel.
        self.count = torch.linalg.vector_norm(self._size, 0, dtype=torch.promote_types(self.g.dtype, torch.float32))

    def gradient(self) -> Gradient:
        """Logits and gradient in float32 or wider: all rows, since a choice of them may show another factor."""
        return Gradient(wide(self.z), wide(self.g), self._size > 0, self.count, self._tolerance)
