"""Algorithm 1 for one batch: forecast at the forward, penalty at the backward, and what a step has seen so far.

Apart from optimizer.py, since Lightning runs the optimizer's methods on another object: the state is here.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _rng
from dcl_optim._optim import gradients_of, parameters_of
from dcl_optim._rng import RngState
from dcl_optim._torch import (
    call_after_backward,
    current_backward,
    exporting,
    functorch_transform,
    teaches,
    version_of,
    warn,
)
from dcl_optim._validation import PRIVATE, is_number, is_private
from dcl_optim.distances import Distance, depends_on_class_dim
from dcl_optim.forecaster import LOOK_EVERY, Forecaster, ForwardRecord, Scale
from dcl_optim.hooks import outputs
from dcl_optim.hooks.criterion import linked_forwards, terms_of_sum
from dcl_optim.hooks.cross_entropy import find_class_dim, may_be_read, read_cross_entropy
from dcl_optim.hooks.labels import HIDDEN, Labels
from dcl_optim.hooks.loss_scale import LossScale
from dcl_optim.hooks.module_hooks import ModuleHooks, replace_others
from dcl_optim.hooks.outputs import candidates, conversion_source, find_loss, through_logits
from dcl_optim.schedules import Checked

_requires_grad = attrgetter("requires_grad")
FIGURES = ("penalty", "weight", "alpha", "loss_scale")  # of each backward, for logs
MOST_RECORDS = 64  # of forwards, before those that are gone are looked for


@dataclass
class StepState:
    """What has happened since the last optimizer step. The Regularizer alone writes it."""

    backwards: int = 0  # through the logits of training forwards
    observing: bool = True  # whether the forecaster observes forwards; not evaluations inside the base's step
    stepping: bool = False  # whether the base is in its step, without a closure
    called: bool = False  # whether the model was called, in either mode
    cleared: bool = False  # whether `zero_grad` was called since the last training forward or backward
    backward: int = -1  # the last one that brought a gradient to logits, counted or not, by autograd's number
    written: tuple[weakref.ref[Tensor], int] | None = None  # the first gradient after it, and its version, where noted
    left_out: bool = False  # whether a batch had no part, since its penalty was not finite
    penalties: list[Tensor] | None = None  # weighted ones of the evaluation that runs, where LBFGS wants its value


class Regularizer:
    r"""Adds :math:`s\lambda\,\partial\Delta(z, c)/\partial z` to the gradient of the logits of each training forward.

    All that changes while a script runs is kept here and not on the optimizer, because some libraries (Lightning) hand
    out optimizers that run our methods on an object of their own.
    """

    state: StepState
    steps: int  # of the optimizer so far
    forwards: int  # training forwards so far
    backwards: int  # through their logits so far
    last: dict[str, Any]  # figures of the last backward, for logs
    _records: list[weakref.ref[ForwardRecord]]  # forwards that a criterion may be called on
    _criterion_input: Callable[[], Tensor | None]  # what the criterion was called on last
    _criterion_calls: int  # on one tensor after another
    _rng_state: RngState | None  # before the training forward that is running
    class_dim: int | None  # the dimension of the classes, of logits of three dimensions or more
    _class_dim: int | None  # None until it is found
    _hooks: ModuleHooks | None = None

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        forecaster: Forecaster,
        distance: Distance,
        *,
        weight: Checked,
        alpha: Checked,
        criterion: nn.Module | None,
        labels: Labels | None,
        loss_scale: LossScale,
        find_logits: Callable[[Any], Tensor],
        class_dim: int | None,
        count_eval: bool,
    ) -> None:
        self.model, self._base, self.forecaster, self._distance = model, base, forecaster, distance
        self.weight, self.alpha, self._criterion, self.labels = weight, alpha, criterion, labels
        self._parameters = functools.partial(parameters_of, base)
        self._loss_scale, self._find_logits, self._count_eval = loss_scale, find_logits, count_eval
        self._given_class_dim = class_dim
        self._warns_of_choice = find_logits is outputs.find_logits
        self.superseded = self._notes_gradients = self._has_told = False
        self.load_steps(0)
        self.attach()

    def attach(self) -> None:
        """Put the hooks on; an optimizer that had its own there is superseded."""
        replace_others(self.model)
        self._hooks, self.attached = ModuleHooks(self, self.model, self._criterion), True

    def detach(self) -> None:
        """Take the hooks off; model and criterion are as they were."""
        if self._hooks is not None:
            self._hooks.remove()
        self.attached = self.superseded = False

    def model_loaded(self) -> None:
        """A state was loaded into the model."""
        self.forecaster.model_loaded()

    def replaced(self) -> None:
        """Make way for another optimizer on the same model."""
        self.detach()
        self.forecaster.forget()
        self.state, self.superseded = StepState(), True

    def figures(self) -> dict[str, Any]:
        """Figures of the last backward, numbers or scalar tensors; nan before the first."""
        return dict.fromkeys(FIGURES, math.nan) | self.last

    def settings(self) -> dict[str, Any]:
        """What was chosen, as the optimizer's repr shows it."""
        distance = getattr(self._distance, "func", self._distance)
        source = self._loss_scale.source
        if self._criterion is not None and source == "auto":
            scale = f"from {type(self._criterion).__name__}"
        else:
            scale = source if isinstance(source, str) or is_number(source) else type(source).__name__
        name = getattr(distance, "__name__", type(distance).__name__)
        return {"weight": self.weight, "alpha": self.alpha, "distance": name, "loss_scale": scale}

    # ---- the forward: c = f(ω, x) ------------------------------------------------------------------------------------

    def before_forward(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop a step that was skipped, and remember the RNG state that the model draws from."""
        self._rng_state, self.state.called = None, True
        if self.labels is not None:
            self.labels.before_forward()
        if not (training or self._count_eval) or not torch.is_grad_enabled():
            return
        if self._is_no_training_forward():
            return
        if not self.forwards and is_private(self._base):
            raise RuntimeError(f"the wrapped optimizer was made private, which is refused: {PRIVATE}; call detach()")
        if self.state.backwards and self._gradients_are_gone():
            self._forget_step()
        self.state.cleared = False
        replays = self.forecaster.replays_draws
        self._rng_state = _rng.capture(next(parameters_of(self._base)).device) if replays else {}
        self.forecaster.before_forward(args, kwargs, self._rng_state, self.steps + 1)

    def _is_no_training_forward(self) -> bool:
        """Whether checkpointing recomputes a counted forward, torch.func or an export runs it, or nothing trains."""
        backward = current_backward()
        if backward != -1 and backward == self.state.backward:
            return True
        return (
            exporting() or functorch_transform() is not None or not any(map(_requires_grad, parameters_of(self._base)))
        )

    def after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Make the forecast c, and wait for the gradient of the logits z; return the output, or one in its place."""
        rng_state, self._rng_state = self._rng_state, None
        if rng_state is None:
            return output
        z = self._find_logits(output)
        if not z.requires_grad:
            return output
        record = ForwardRecord(z, 1 if self._class_dim is None else self._class_dim)
        if self.labels is not None:
            self.labels.read(record, args, kwargs)
        self.forecaster.predict(args, kwargs, record, rng_state)
        if output is not z:
            if self._warns_of_choice:
                self._warn_of_choice(output, z)
            output = self._await_own_loss(z, record, output, (args, kwargs))
        z.register_hook(functools.partial(self._add_penalty, record))
        if self._criterion is not None:
            if len(self._records) > MOST_RECORDS:  # the criterion has not been called for long
                self._records = [reference for reference in self._records if reference() is not None]
            self._records.append(weakref.ref(record))
        self.forwards += 1
        return output

    def _warn_of_choice(self, output: Any, z: Tensor) -> None:
        taken, *others = candidates(output, z) or [""]
        if others:
            self._warns_of_choice = False
            warn(
                f"the model returned a {type(output).__name__} in which several tensors may be the logits: the penalty "
                f"is on {taken}, not on {' or '.join(others)}; pass logits=lambda output: output[...] to choose"
            )

    def _await_own_loss(self, z: Tensor, record: ForwardRecord, output: Any, arguments: tuple[Any, ...]) -> Any:
        """Prepare for a loss that the model computed itself, perhaps from logits that it converted afterwards."""
        loss = find_loss(output)
        if loss is not None:
            own, (loss, output) = loss, through_logits(z, loss, output)
            record.loss_hides_gradient = loss is not own
            if record.loss_hides_gradient and self.labels is not None and self.labels.are_missing(record):
                given = self._class_dim if self._class_dim is None else self._class_dim % z.ndim
                self._class_dim = self.labels.find_in_arguments(record, z, own, arguments, given) or self._class_dim
            note = functools.partial(record.note_loss_scale, loss.output_nr)
            loss.grad_fn.register_prehook(note)  # type: ignore[union-attr]
        source = conversion_source(z)
        if source is not None:
            record.nodes_below = source[0].next_functions
            source[0].register_prehook(functools.partial(self._add_penalty_at_source, record, source[1]))
        return output

    def after_criterion(self, arguments: Any, logits: Any, targets: Any, loss: Tensor) -> None:
        """Take the labels, and read what the loss is multiplied by off its gradient.

        A loss of several forwards that were put together first is shared among them by their rows, as if they had been
        one forward; each of several whose very outputs it was given has it whole.
        """
        records = []
        for reference in self._records:
            record = reference()
            if record is not None:
                records.append(record)
        self._records = list(map(weakref.ref, records))
        linked, exact = linked_forwards(records, arguments)
        if self.labels is not None and len(linked) > 1 and any(record.targets is None for record in linked):
            raise RuntimeError(
                "several forwards of the model wait for their backward, and the criterion was called on something "
                "computed from them, whose labels do not say which are whose: call set_targets(labels) before each "
                "forward, or the criterion on each output as the model returned it"
            )
        terms = terms_of_sum(self._criterion, logits, targets)
        rows = 0 if exact or len(linked) == 1 else sum(len(record.logits) for record in linked)
        if self._criterion_input() is not logits or logits is None:  # mixed labels have two calls on one tensor
            self._criterion_calls += 1
        self._criterion_input = weakref.ref(logits) if isinstance(logits, Tensor) else _nothing
        for record in linked:
            if record.link(exact):
                if self.labels is not None and not record.counted:
                    self.labels.take(record, targets)
                share = len(record.logits) / rows if rows else 1.0
                call = None if exact or record.holds(logits) else (self._criterion_calls, len(linked))
                note = functools.partial(record.add_loss_scale, exact, call, terms * share, loss.output_nr)
                loss.grad_fn.register_prehook(note)  # type: ignore[union-attr]

    # ---- the backward: grad z + s λ ∂Δ(z, c)/∂z ----------------------------------------------------------------------

    def _add_penalty(self, record: ForwardRecord, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the loss's gradient of the logits: add the penalty's (Equation 2)."""
        backward = current_backward()
        if gradient is None or not self.attached or record.added_in == backward:
            return None
        if not teaches(record.nodes_below, self._parameters):  # an attack asks for the gradient of its inputs
            self.state.backward = backward
            return None
        self.backwards += 1
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the script's loss
            return None
        if self.state.backwards and not record.counted and self._were_cleared_since_the_forward(backward):
            self._forget_step()
        state = self.state
        weight, alpha = self.weight(self.steps + 1), self.alpha(self.steps + 1)
        scale = self._read(record, gradient, backward)
        value, slope = self.forecaster.penalty(record, self._distance)
        record.added_in = backward
        finite = record.finite = self._are_finite(value, scale)
        if isinstance(finite, Tensor):  # a batch of a loss scale of 0 has no part in either gradient
            slope = torch.where(finite, slope, 0.0)
            scale = torch.where(finite, scale, 0.0) if isinstance(scale, Tensor) else finite.to(value.dtype) * scale
        if state.observing and not record.counted:
            if finite is False:
                self.forecaster.skip(record, alpha)
            else:
                self.forecaster.observe(record, self._distance, alpha, scale)
        record.counted = True
        state.backwards += 1
        state.backward, state.cleared = backward, False
        if self._notes_gradients:
            # After what DistributedDataParallel has called at the end, which writes to the gradients.
            call_after_backward(functools.partial(call_after_backward, self._note_gradient))
        self.last = {"penalty": value, "weight": weight, "alpha": alpha, "loss_scale": scale}
        if finite is False:
            state.left_out = True
            return None
        if weight == 0:
            return None
        factor = scale * weight
        if state.penalties is not None:
            state.penalties.append(value * factor)
        return _plus(gradient, record.unrows(slope), factor)

    def _read(self, record: ForwardRecord, gradient: Tensor, backward: int) -> Scale:
        """Read what the script did not say off the loss's gradient: class dimension, labels; give the loss scale."""
        is_hidden = record.loss_hides_gradient and record.model_scale[0] == backward
        if len(record.shape) > 2:
            self._settle_class_dim(record, gradient, is_hidden)
        labels = self.labels if self.labels is not None and self.labels.are_missing(record) else None
        if is_hidden and labels is not None:
            raise RuntimeError(HIDDEN)  # not even among the model's arguments
        reading, is_said = None, record.criterion_scale[0] == backward or self._loss_scale.source != "auto"
        if labels is not None or not is_said:
            reading = read_cross_entropy(record.logits, record.rows(gradient))
        scale = self._loss_scale.resolve(record, gradient, reading, backward, several=self.state.backwards > 0)
        if labels is not None and reading is not None:
            look = gradient.device.type == "cpu" or (self.steps + 1) % LOOK_EVERY == 0
            labels.take_read(record, reading, gradient, look)
        return scale

    def _settle_class_dim(self, record: ForwardRecord, gradient: Tensor, is_hidden: bool) -> None:
        """Find the dimension of the classes, at the first gradient that tells."""
        if self._class_dim is None:
            z = record.unrows(record.logits)
            self._class_dim = find_class_dim(z, gradient)
            if self._class_dim is None and (is_hidden or may_be_read(z, gradient)):
                self._class_dim = 1
                if depends_on_class_dim(self._distance):
                    warn(
                        f"class_dim was not given, and cannot be read off this loss's gradient: of the model's logits "
                        f"of shape {tuple(z.shape)} the penalty takes dimension 1 for the classes, as F.cross_entropy "
                        "does; pass class_dim=-1 for (batch, time, classes), or class_dim=1"
                    )
        record.is_open = self._class_dim is None
        if self._class_dim is not None:
            self.class_dim = self._class_dim % len(record.shape)
            if self._class_dim != record.class_dim:
                record.lay_out(self._class_dim)

    def _are_finite(self, value: Tensor, scale: Scale) -> bool | Tensor:
        """Whether the batch takes part: of logits, a forecast or a loss scale that is not finite nothing is to learn.

        All of them are in the value of the penalty and in the scale. On a device this is a tensor, but for one step in
        ``LOOK_EVERY``, since a look synchronises.
        """
        if value.device.type == "cpu" or (self.steps + 1) % LOOK_EVERY == 0:
            return math.isfinite(value) and math.isfinite(scale)
        return value * 0.0 * scale == 0.0  # fewer kernels than isfinite

    def _add_penalty_at_source(self, record: ForwardRecord, index: int, gradients: tuple[Tensor, ...]) -> Any:
        """As :meth:`_add_penalty`, for a loss that the model took from its logits before it converted them."""
        gradient = self._add_penalty(record, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    # ---- the step ----------------------------------------------------------------------------------------------------

    def gradients_cleared(self) -> None:
        """``zero_grad`` was called."""
        self.state.cleared = True

    def stop_observing(self) -> None:
        """The forecaster has its gradients: forwards until the next step are evaluations inside the base's."""
        self.state.observing = False

    def begin_base_step(self) -> None:
        """The base steps without a closure; if it evaluates the model itself (GSAM), the first one is observed."""
        self.state.stepping, self.state.observing = True, not self.state.backwards

    def resume_observing(self) -> None:
        """The base's step has raised."""
        self.state.observing, self.state.stepping, self.state.penalties = True, False, None

    def collect_penalties(self) -> list[Tensor]:
        """Begin an evaluation whose penalties are wanted; the list that they are going to be in."""
        self.state.penalties = []
        return self.state.penalties

    def start_new_step(self) -> None:
        """Both networks have stepped."""
        if self.state.left_out and not self._has_told:
            self._has_told = True
            warn(
                "a step was taken on a batch whose penalty or loss scale is not finite, since the model's logits, the "
                "forecast or the loss are not: this batch and others like it get no penalty, and neither the companion "
                "nor the prototypes learn from them. Classes that are masked by logits of minus infinity have to be "
                "masked alike in all rows"
            )
        self.state = StepState()
        self.steps += 1

    def load_steps(self, steps: int, class_dim: int | None = None) -> None:
        """Forget what has happened, and go on from a number of steps and what was found, as after loading a state."""
        self.class_dim = class_dim
        self._class_dim = class_dim if self._given_class_dim is None else self._given_class_dim
        self.state = StepState()
        self._records, self._rng_state, self.last = [], None, {}
        self._criterion_input, self._criterion_calls = _nothing, 0
        self.steps, self.forwards, self.backwards = steps, 0, 0
        if self.labels is not None:
            self.labels.start(has_read=steps > 0)

    def has_gradients(self) -> bool:
        """Whether any parameter that the base trains has a gradient."""
        return next(gradients_of(self._base), None) is not None

    def forget_cleared_batches(self) -> None:
        """Before a step: forget batches whose gradients the script has cleared, which the base does not learn from.

        Gradients that are there after ``zero_grad`` the script has put there itself, as gradient surgery does.
        """
        if self.state.backwards and not (self._are_not_all_zero() if self.state.cleared else self.has_gradients()):
            self._forget_step()

    def _gradients_are_gone(self) -> bool:
        """Whether the gradients of the last backwards were cleared without a step, as where a scaler skips it."""
        if self.state.cleared:
            return True
        first = next(gradients_of(self._base), None)
        if first is None:
            return True
        # Zeros may have been written over them. Their values, which synchronise a device, are read where something
        # was written since the backward; and once, before it is known that this script has several backwards a step.
        written, self._notes_gradients = self.state.written, True
        if written is not None and written[0]() is first and written[1] == version_of(first):
            return False
        return not self._are_not_all_zero()

    def _are_not_all_zero(self) -> bool:
        return any(bool(gradient.any()) for gradient in gradients_of(self._base))

    def _were_cleared_since_the_forward(self, backward: int) -> bool:
        """As above, for a backward whose forward began when there were gradients of others."""
        state = self.state
        together = state.backward == backward  # with one that has been counted, as of a sum of losses
        return state.cleared or (not together and self._gradients_are_gone())

    def _note_gradient(self) -> None:
        """After a backward: note the first gradient, and how often it has been written to."""
        gradient = next(gradients_of(self._base), None)
        self.state.written = None if gradient is None else (weakref.ref(gradient), version_of(gradient))

    def _forget_step(self) -> None:
        """Drop what was counted; if the base is evaluating the model again in its step, that was learned from."""
        if not self.state.backwards or not self.state.observing:
            return
        if self.state.stepping:  # the gradients of its first evaluation: the next one is elsewhere
            self.stop_observing()
        else:
            self.forecaster.forget()
            self.state = StepState(penalties=self.state.penalties)

    # ---- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_criterion_input", "_hooks", "_records", "_rng_state", "last"}
        state = StepState(backwards=self.state.backwards, cleared=self.state.cleared)
        return {key: value for key, value in self.__dict__.items() if key not in transient} | {"state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._records, self._rng_state, self.last = [], None, {}
        self._criterion_input = _nothing
        self.__dict__.update(state)
        if self.attached and "training" in vars(self.model):  # not if the model holds us and is being copied
            self.attach()


def _nothing() -> None:
    return None


def _plus(gradient: Tensor, slope: Tensor, factor: float | Tensor) -> Tensor:
    """Add the penalty's gradient to the loss's, in the wider of their dtypes, and give it in the loss's."""
    if isinstance(factor, Tensor):
        slope, factor = slope * factor, 1.0
    if gradient.dtype == slope.dtype:
        return torch.add(gradient, slope, alpha=factor)
    return torch.add(gradient.to(slope.dtype), slope, alpha=factor).to(gradient.dtype)
