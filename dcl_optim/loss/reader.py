r"""The one place that knows losses: loss scale, labels and class dimension of each backward pass.

| what | sources, the first that applies |
| --- | --- |
| s | ``loss_scale=``; the gradient of the logits; that of the model's own loss; the last s read; a GradScaler's; 1 |
| labels | ``set_targets``; ``targets=``; the gradient of the logits; with ``loss_scale=`` a row's only negative entry |
| class dimension | ``class_dim=``; the dimension along which the gradient has a known form; 1 |

The form of the gradient is chosen at the first gradient that tells it, and again when a batch does not fit, in the next
step in which values may be read.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim import _sync
from dcl_optim._torch import current_backward, warn
from dcl_optim._validation import check_integer, check_positive, is_number
from dcl_optim.distances import to_rows, wide
from dcl_optim.forward import Forward
from dcl_optim.loss import cross_entropy, outputs, unread
from dcl_optim.loss.cross_entropy import Evidence, Form, Reading

Scale = float | Tensor
Targets = str | Callable[[tuple[Any, ...], dict[str, Any]], Tensor]
MAX_ROWS = 64  # that are read where only the scale is asked for
FEW_LOGITS = 2**14  # so few are read faster than selected
DECIDED = 20  # steps after which labels that cannot be read are no longer an error


class Loss(NamedTuple):
    """What a backward pass says about the script's loss.

    Attributes:
        scale: s, what the loss was multiplied by.
        labels: as given; read ones as a label for each row (N,), K for none, or soft labels (N, K); None without any.
        number: the number of rows that the loss is the mean of, if the labels were read; else None.
        class_dim: the dimension of the logits that holds the classes.
        finite: False if the gradient is known not to be finite.
        says: False if the batch is to be skipped: it is not finite, or labels that are needed are missing.
        read: s as this gradient shows it, not finite if the gradient is not; None if it was not read.
    """

    scale: Scale
    labels: Tensor | None
    number: Tensor | None
    class_dim: int
    finite: bool = True
    says: bool = True
    read: Tensor | None = None


class LossReader:
    """Reads one backward pass after another.

    Args:
        scale, targets: ``loss_scale`` and ``targets`` of :class:`~dcl_optim.DCPOptimizer`.
        reads_labels: whether labels are needed.
        class_dim, needs_class_dim: the class dimension, None to find it; whether the penalty depends on it.

    Examples:
        >>> LossReader(scale="half")
        Traceback (most recent call last):
        ...
        ValueError: loss_scale='half' is unknown; pass 'auto', a number, a GradScaler or a callable
    """

    def __init__(
        self,
        scale: Any = "auto",
        targets: Targets | None = None,
        reads_labels: bool = False,
        class_dim: int | None = None,
        needs_class_dim: bool = False,
    ) -> None:
        if is_number(scale):
            check_positive("loss_scale", scale)
        elif isinstance(scale, str) and scale != "auto":
            raise ValueError(f"loss_scale={scale!r} is unknown; pass 'auto', a number, a GradScaler or a callable")
        elif not (isinstance(scale, str) or hasattr(scale, "scale") or callable(scale)):
            raise TypeError(f"loss_scale must be 'auto', a number, a GradScaler or a callable, got {scale!r}")
        if targets is not None and not isinstance(targets, str) and not callable(targets):
            raise TypeError(f"targets must be a keyword's name or a callable (args, kwargs) -> labels, got {targets!r}")
        self.source, self._targets, self.reads_labels = scale, targets, reads_labels
        self._given_dim = None if class_dim is None else check_integer("class_dim", class_dim)
        self._needs_class_dim = needs_class_dim
        self._warned: set[str] = set()
        self.skipped = unread.Skipped()
        self.load_state({})

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know, in types that ``torch.load(weights_only=True)`` reads. Synchronizes."""
        form = None if self._form is None else f"{self._form.kind} {self._form.smoothing!r}"
        scale = self.__getstate__()["_scale"]
        return {"form": form, "scale": None if scale is None else float(scale), "class_dim": self.class_dim}

    def check_state(self, state: Any) -> None:
        """Raise ValueError if a state does not fit, before anything is changed."""
        try:
            form, scale, class_dim = state["form"], state["scale"], state["class_dim"]
            kind, _, smoothing = ("hard 0.0" if form is None else form).partition(" ")
            fits = kind in cross_entropy.READERS and 0.0 <= float(smoothing) < 1.0
            fits &= scale is None or (is_number(scale) and math.isfinite(scale))
            fits &= class_dim is None or (is_number(class_dim) and class_dim == abs(int(class_dim)))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"the state of the loss does not fit: {state!r}")

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; an empty one is that before the first batch."""
        kind, _, smoothing = (state.get("form") or "").partition(" ")
        self._form = Form(kind, float(smoothing)) if kind else None  # type: ignore[arg-type]
        self._scaler: Any = None  # the gradient scaler that steps
        self._scale: Scale | None = state.get("scale")  # the last one that was read before this step, over the scaler's
        self._latest: Scale | None = self._scale  # the last one that was read, over the scaler's
        self.class_dim: int | None = state.get("class_dim")
        # Batches whose gradient has a known form, and has none though it says something; a former run has decided.
        self._read, self._unread = DECIDED if kind else 0, 0
        self._shifts: bool | None = None  # whether the model's own loss shifts its labels, once that is known
        self.ahead: tuple[Tensor | None, Tensor | None] | None = None  # labels of the next and the current forward pass

    def end_step(self) -> None:
        """Keep what was read in a step that was taken."""
        self._scale = self._latest

    def note_scaler(self, scaler: Any) -> None:
        """A gradient scaler steps. The last s goes up and down with its scale."""
        if scaler is not self._scaler:
            before, self._scaler = self._scaler_scale(), scaler
            after, both = self._scaler_scale(), (self._scale, self._latest)
            self._scale, self._latest = (None if s is None else s * before / after for s in both)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the scale for a start, and not the scaler, which cannot be copied at all times.
        if self._scaler is None:
            return self.__dict__
        unit = self._scaler_scale()
        scales = {"_scale": self._scale, "_latest": self._latest}
        scales = {name: unit if scale is None else scale * unit for name, scale in scales.items()}
        return self.__dict__ | {"_scaler": None} | scales

    def _scaler_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    # ---- the forward pass --------------------------------------------------------------------------------------------

    def set_targets(self, targets: Tensor) -> None:
        """Give the labels of the next forward pass."""
        self.ahead = targets, None

    def before_forward(self) -> None:
        """Take the labels that were given for the forward pass that begins; one that does not count drops them."""
        if self.ahead is not None and current_backward() == -1:  # inside a backward pass it is a recomputation
            following, _ = self.ahead
            self.ahead = None if following is None else (None, following)

    def after_forward(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the labels that are known when the model has returned; raise if they were given twice or not at all."""
        if self._given_dim is not None:
            self._dim_of(forward.logits)
        if self.ahead is not None:
            following, forward.targets = self.ahead
            self.ahead = None if following is None else (following, None)
        if self._targets is None:
            return
        found = kwargs.get(self._targets) if isinstance(self._targets, str) else self._targets(args, kwargs)
        if found is None and isinstance(self._targets, str):
            raise ValueError(f"targets={self._targets!r}: the model was called without that keyword")
        if forward.targets is not None:
            raise RuntimeError("one forward pass got labels twice, from targets= and from set_targets: use one of them")
        forward.targets = found

    def watch_own_loss(self, forward: Forward, z: Tensor, output: Any, kwargs: dict[str, Any]) -> Any:
        """Watch the loss that the model computed itself, if it did; return the output, or one in its place."""
        own = outputs.find_loss(output)
        if own is None:
            return output
        loss, output = outputs.through_logits(z, own, output)
        forward.hides_gradient = loss is not own
        labels = kwargs.get("labels")
        if forward.hides_gradient and self.reads_labels and forward.targets is None and isinstance(labels, Tensor):
            if self._shifts is None:
                self._shifts = outputs.find_shift(labels, z, own)
            if self._shifts is not None:
                forward.targets = outputs.shift(labels) if self._shifts else labels
                self.class_dim = z.ndim - 1
        index = loss.output_nr

        def note(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[index]
            if gradient is not None:
                forward.own_loss = current_backward(), gradient.sum()

        loss.grad_fn.register_prehook(note)  # type: ignore[union-attr]
        return output

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def read(self, forward: Forward, gradient: Tensor, several: bool) -> Loss:
        """Read the gradient of the logits, and lay them out as rows; ``several``: it is not the first of the step."""
        given = None if self.source == "auto" else self._given_scale(gradient, self.source)
        dim = 1 if gradient.ndim <= 2 and self._given_dim is None else self._dim_of(gradient)
        arrived = forward.own_loss is not None and forward.own_loss[0] == current_backward()
        own = forward.own_loss[1] if forward.own_loss is not None and arrived else None
        wants_labels = self.reads_labels and forward.targets is None
        if wants_labels and self.ahead is not None and self.ahead[0] is not None:
            raise RuntimeError(unread.LATE_LABELS)
        if own is not None and forward.hides_gradient:
            if wants_labels:
                raise RuntimeError(unread.HIDDEN_LABELS)
            given = own if given is None else given
            if dim is None:
                dim = self._assume_class_dim(gradient)
        may_sync = _sync.may_sync(forward.step, gradient)
        if given is not None and not wants_labels and dim is not None:
            forward.rows = to_rows(forward.logits, dim)
            finite = not may_sync or math.isfinite(gradient.sum())
            if not finite and self.reads_labels:
                self.skipped.fits.append(False)
            return Loss(given, forward.targets, None, dim, finite, finite)
        form, reading, count, total = self._form, None, None, 1.0
        if form is not None and dim is not None:
            seen = _Seen(forward, gradient, dim, form)
            forward.rows = seen.z
            reading, count = self._read_rows(form, seen, wants_labels), seen.count
            settles = may_sync and not bool(reading.fits)
            self._read += may_sync and not settles
        else:
            decides = forward.step % _sync.SYNC_INTERVAL == 0 or (wants_labels and may_sync and forward.step <= DECIDED)
            settles = decides or not self._unread
            if not settles:
                count = torch.linalg.vector_norm(wide(gradient), 1)
                total = float(count) if may_sync else total
        if settles:
            reading, count, dim, total = self._settle(forward, gradient, wants_labels, given is not None)
        says = math.isfinite(total) and not (wants_labels and reading is None)
        if self.reads_labels:
            self.skipped.fits.append(says if reading is None or may_sync or not wants_labels else reading.fits)
            if may_sync and len(self.skipped.fits) >= 2 * unread.WINDOW:
                self.skipped.total()
        scale = given
        if total == 0:
            scale = 0.0
        elif scale is None:
            scale = self._scale_of(reading, own, several, forward, gradient)
            if count is not None and not (wants_labels or may_sync):
                scale = scale * (count > 0)  # a gradient of zero: the loss has the factor 0
        dim = 1 if dim is None else dim
        if reading is None:
            forward.rows = to_rows(forward.logits, dim)
        if not wants_labels or reading is None or count is None:
            read = None if reading is None else reading.scale
            return Loss(scale, forward.targets, None, dim, math.isfinite(total), says, read)
        return Loss(scale, reading.labels, count.clamp(min=1), dim, True, says, reading.scale)

    def _dim_of(self, logits: Tensor) -> int | None:
        """The class dimension, counted from 0; None while it is not known."""
        dim = self.class_dim if self._given_dim is None else self._given_dim
        if dim is None:
            return 1 if logits.ndim <= 2 else None
        if not -logits.ndim <= dim < max(logits.ndim, 2):
            raise ValueError(f"class_dim={dim} but the model's logits have shape {tuple(logits.shape)}")
        return dim % max(logits.ndim, 2)

    def _given_scale(self, gradient: Tensor, source: Any) -> Scale:
        if isinstance(source, numbers.Real):
            return float(source)
        found = source.scale(torch.ones((), device=gradient.device)) if hasattr(source, "scale") else source()
        if isinstance(found, Tensor) and found.numel() == 1:
            return found.detach().reshape(())
        if not is_number(found):
            raise TypeError(f"loss_scale's callable must return a number or a scalar tensor, got {found!r}")
        if not math.isfinite(found):
            raise ValueError(f"loss_scale's callable returned {found!r}; it must be a finite number")
        return float(found)

    def _scale_of(
        self, reading: Reading | None, own: Tensor | None, several: bool, forward: Forward, gradient: Tensor
    ) -> Scale:
        unit: Scale | None = None if self._scaler is None else self._given_scale(gradient, self._scaler)
        last = self._latest if self._scale is None else self._scale  # of the first step an earlier batch
        last = 1.0 if last is None else last
        fallback = own if own is not None else last if unit is None else unit * last
        if reading is None or self._form is None or self._form.kind == "negative":
            # The first step of a gradient scaler tells its scale.
            asks = several or (gradient.dtype == torch.float16 and forward.step > 1 and unit is None)
            if asks and own is None and self._scale is None and self._unread:
                self._warn(unread.UNREADABLE_SCALE)
            return fallback
        same = fallback.to(reading.scale) if isinstance(fallback, Tensor) else torch.full_like(reading.scale, fallback)
        scale = torch.where(reading.tells_scale, reading.scale, same)
        self._latest = scale if unit is None else scale / unit
        return scale

    def _read_rows(self, form: Form, seen: _Seen, wants_labels: bool) -> Reading:
        z, g, live = seen.rows(wants_labels or form.kind == "weighted")
        return cross_entropy.read(form, z, g, live, seen.count, seen.tolerance, wants_labels)

    def _settle(
        self, forward: Forward, gradient: Tensor, wants_labels: bool, has_scale: bool
    ) -> tuple[Reading | None, Tensor | None, int | None, float]:
        """Choose form and class dimension, and read. Returns also the number of live rows, the dimension, the sum."""
        known = self._dim_of(gradient)
        dims = [known] if known is not None else [d for d in range(1, gradient.ndim) if gradient.shape[d] > 1] or [1]
        laid_out = [_Seen(forward, gradient, dim, None) for dim in dims]
        if not len(laid_out[0].g):
            return None, None, known, 0.0
        vectors = [cross_entropy.examine(*one.rows(wants_labels)[:2], one.tolerance) for one in laid_out]
        softmax = torch.stack([unread.are_probabilities(one.z) for one in laid_out])
        rows = torch.cat([torch.stack(vectors), softmax[:, None]], 1).tolist()  # one wait for all
        found = [Evidence(*numbers) for *numbers, _ in rows]
        total = found[0].total
        if not 0 < total < math.inf:
            return None, None, known, total
        trials = [
            (rank, form, dim, one)
            for dim, one, evidence in zip(dims, laid_out, found, strict=True)
            for rank, form in cross_entropy.candidates(
                evidence, one.z.shape[1], self._form, allows_negative=has_scale and wants_labels
            )
        ]
        for _, form, dim, one in sorted(trials, key=itemgetter(0)):
            reading = self._read_rows(form, one, wants_labels)
            if bool(reading.fits):
                self._form, forward.rows, self._read = form, one.z, self._read + 1
                self.class_dim = dim if known is None else self.class_dim
                if rows[dims.index(dim)][-1] and form.kind != "log":
                    self._warn(unread.SOFTMAX_TWICE)
                return reading, one.count, dim, total
        if all(evidence.says for evidence in found):  # else the one that says nothing yet may be that of the classes
            self._refuse(forward, wants_labels, known, laid_out[0])
        return None, None, known, total

    def _refuse(self, forward: Forward, wants_labels: bool, class_dim: int | None, seen: _Seen) -> None:
        """A gradient that says something has no known form: an error where that matters, or a warning."""
        self._unread += 1
        if wants_labels:
            cause = unread.cause_of(seen.z, seen.g)
            if self._form is None or (self._unread > self._read and forward.step <= DECIDED):
                of = f" ({self._read} of the first {self._read + self._unread} could)" if self._form else ""
                raise RuntimeError(f"{unread.UNREADABLE_LABELS}{of}.{cause}")
            self.skipped.total()
            last = [*self.skipped.fits, False][-unread.WINDOW :]
            number = last.count(False)
            said = f"{number} of the last {len(last)} batches got no penalty: {unread.UNREADABLE_LABELS}.{cause}"
            self._warn(said, "labels" if 2 * number <= unread.WINDOW else "most labels")
        if class_dim is None:
            self._assume_class_dim(forward.logits)

    def _warn(self, message: str, about: str = "") -> None:
        """Warn once about something."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            warn(message)

    def _assume_class_dim(self, gradient: Tensor) -> int:
        """Take dimension 1 for the classes, and say so if that matters."""
        self.class_dim = 1
        if self._needs_class_dim:
            warn(
                "class_dim was not given, and cannot be read from this loss's gradient: of the model's logits of shape "
                f"{tuple(gradient.shape)} the penalty takes dimension 1 for the classes, as F.cross_entropy does.\n"
                "  Fix: pass class_dim=-1 for (batch, time, classes), or class_dim=1"
            )
        return 1


class _Seen:
    """A gradient laid out as rows. A live row has a positive entry, since it sums to 0, except of ``NLLLoss``."""

    __slots__ = ("count", "g", "size", "tolerance", "z")

    def __init__(self, forward: Forward, gradient: Tensor, dim: int, form: Form | None) -> None:
        z, g = forward.logits, gradient
        if gradient.ndim != 2 or dim != 1:
            z, g = to_rows(z, dim), to_rows(g, dim)
        self.z, self.g = z, g
        self.tolerance = cross_entropy.tolerance_of(z.dtype, g.dtype)
        self.size = g.abs().amax(1) if form is None or form.kind == "log" else g.amax(1)
        # The number of rows that are not zero: the norm of order 0 takes one kernel.
        self.count = torch.linalg.vector_norm(self.size, 0, dtype=torch.promote_types(g.dtype, torch.float32))

    def rows(self, all_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and gradient in float32 or wider, and which rows are live; of many logits only the largest rows."""
        z, g, size = self.z, self.g, self.size
        if not all_rows and z.numel() > FEW_LOGITS and len(z) > MAX_ROWS:
            size, rows = size.topk(MAX_ROWS)
            z, g = z.index_select(0, rows), g.index_select(0, rows)
        return wide(z), wide(g), size > 0
