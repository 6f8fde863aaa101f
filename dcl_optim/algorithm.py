r"""Algorithm 1 for one batch, by both ways: the gradient of the logits (the line), and the penalty term.

Not in optimizer.py, since Lightning runs the optimizer's methods on another object.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _sync
from dcl_optim._hooks import Hook, ModuleHooks
from dcl_optim._optim import have_gradients, parameters_of, trains_any
from dcl_optim._torch import (
    call_after_backward,
    constant,
    current_backward,
    is_recorded,
    reaches_parameters,
    version_of,
    warn_once,
)
from dcl_optim._validation import refuse_replica
from dcl_optim.distributed import unwrapped
from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.loss.outputs import conversion_source, find_logits
from dcl_optim.loss.reader import LossReader
from dcl_optim.pull import Pull, Scale
from dcl_optim.schedules import Checked
from dcl_optim.step import Forward, Part, State, Step
from dcl_optim.weights import FollowingFit

NOT_FINITE = (
    "non-finite logits or loss: a batch whose gradient of the logits is not finite gets no penalty, and neither the "
    "companion nor the prototypes learn from it"
)
BYPASSED = (
    "{name} wraps the optimizer, but the base {base} was stepped twice, or another method changed the weights: "
    "prototypes and companion learn nothing.\n"
    "  Fix: call step() of the wrapper, with SAM step(closure), also in trainers and schedulers. "
    "strict=False allows such steps. See docs/get-started.md"
)
GIVEN_TWICE = (
    "{}.penalty was called twice with the same logits since the last step, which would count them twice.\n"
    "  Fix: call it once, and use what it returned again, or call the model again{}. See docs/losses.md"
)
MIXED_LABELS = "; for mixup pass soft labels, lam * F.one_hot(a, K) + (1 - lam) * F.one_hot(b, K)"
TOO_LATE = (
    "{}.penalty was called after a backward pass through the same logits, in which they got their penalty.\n"
    "  Fix: call it before the first backward pass. See docs/losses.md"
)
ONCE = (
    "{}.penalty is differentiable once, and this backward pass keeps a graph of the gradient (create_graph=True): its "
    "second derivative would be missing.\n  Fix: take that gradient of the loss without the penalty"
)
STALE = (
    "a backward pass came through what {}.penalty returned before the last step, which is the penalty of other "
    "weights.\n  Fix: call penalty in each step"
)
IDLE_STEPS = 20  # in a row, after which they are a mistake
NOT_TRAINED = (
    f"{{}}.step was called {IDLE_STEPS} times in a row without a training forward pass of the wrapped model: was the "
    "model built again after the optimizer?\n  Fix: build the base optimizer and the wrapper again too"
)
NO_TERM = (
    "the loaded state is of a script that adds {}.penalty to its loss, and no penalty was called in the first step: "
    "without it there is none.\n  Fix: add it, or wrap the optimizer and load the state of the base alone"
)


class Algorithm:
    r"""Adds :math:`s\lambda\,\partial\Delta(z, c)/\partial z` to the gradient of the logits of each forward pass.

    Args:
        model, base, ..., strict: those of ForecastOptimizer, checked; and the wrapper's name.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        forecaster: Forecaster,
        *,
        weight: Checked | FollowingFit,
        alpha: Checked,
        logits: Callable[[Any], Tensor] | None,
        strict: bool,
        name: str,
    ) -> None:
        self.model = model
        self.forecaster = forecaster
        self.reader = LossReader(name, forecaster.reads_labels)
        self.weight = weight
        self.alpha = alpha
        self.num_steps = 0  # of the optimizer so far
        self.step = Step(1)
        self.last: dict[str, Any] = {}  # figures of the last backward pass
        self.superseded = False
        self.is_strict = strict
        self._base = base
        self._logits = logits
        self._name = name
        self._is_training_forward = False  # whether the forward pass that runs is one
        self._is_stepping = False  # whether the wrapper steps the base optimizer
        self._num_bypassed = 0
        self._num_idle = 0  # steps in a row without a training forward pass
        self._last_begun = -1  # the last backward pass whose end is waited for
        self.uses_term = False  # whether the script has called penalty: then the line is off
        self._has_loaded_term = False  # whether that is known from a loaded state alone
        self._said: set[str] = set()
        self.hooks = ModuleHooks(self, model, unwrapped(model), base if strict else None)

    # ---- the forward pass: c = f(ω, x) -------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the model: forget a step that was skipped, and prepare the forecaster."""
        self._is_training_forward = self._is_training(module)
        if not self._is_training_forward:
            return
        refuse_replica(module)
        self._refuse_other_steps()
        if self.step.are_gradients_gone():
            self.forget()
        self.forecaster.before_forward(args, kwargs, self.step.number)

    def _is_training(self, module: nn.Module) -> bool:
        if not module.training or not torch.is_grad_enabled() or is_recorded():
            return False
        backward = current_backward()  # in which activation checkpointing recomputes a forward pass that is noted
        if backward != -1 and backward == self.step.last_backward:
            return False
        return trains_any(self._base)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called with the model's output: predict c, and wait for the gradient of the logits z."""
        if not self._is_training_forward:
            return
        self._is_training_forward = False
        z = find_logits(output, self._logits)
        self.step.num_forwards += 1
        if not z.requires_grad:
            self.forecaster.drop_forward()
            return
        forward = Forward(z, self.step.number, self.reader.dim_of(z) or 1)
        self.forecaster.predict(forward, args, kwargs)
        listener = weakref.ref(self)  # logits that the script keeps must not keep the hooks on the model
        if output is not z:
            forward.is_one_of_several = self._logits is None and isinstance(output, (tuple, list))
            source = conversion_source(z)
            if source is not None:  # the loss may be that of the logits before they were converted
                node, index = source
                forward.nodes = node.next_functions
                node.register_prehook(functools.partial(Hook(listener, "_at_source"), forward, index))
        z.register_hook(functools.partial(Hook(listener, "on_gradient"), forward))
        self.step.add(forward)

    # ---- the line: grad z + s λ ∂Δ(z, c)/∂z --------------------------------------------------------------------------

    def on_gradient(self, forward: Forward, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the gradient of the logits: add that of the penalty (Equation 2)."""
        part = Part.IGNORE if gradient is None else self._begin(forward)
        if gradient is None or part is Part.IGNORE or self.uses_term:
            return None
        weight = self.weight(self.step.number)
        alpha = self.alpha(self.step.number)
        loss = self.reader.read(forward, gradient)
        if loss.fits is None and loss.is_finite and forward.state is State.LEARNED:
            return None  # a further loss of logits that have their penalty
        self.last = {"weight": weight, "alpha": alpha, "loss_scale": loss.scale, "fits": loss.fits}
        if loss.fits is None:
            self._miss(forward, part, alpha, loss.is_finite)
            return None
        pull = self.forecaster.pull(forward, loss.labels)
        self.last["penalty"] = pull.value
        regularized = None
        if self.weight.constant != 0:
            regularized = pull.added_to(gradient, forward.class_dim, loss.scale, weight)
        self._learn(forward, part, pull, loss.labels, loss.scale, alpha)
        return regularized

    def _at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        gradient = self.on_gradient(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    def _begin(self, forward: Forward) -> Part:
        """Note the backward pass that runs, and say what it is to a forward pass."""
        backward = current_backward()
        if not self.hooks.attached or (forward.last_backward == backward and backward != -1):
            return Part.IGNORE
        if not reaches_parameters(forward.nodes, self._base):  # as an attack asks for the gradient of its inputs
            self.step.last_backward = backward
            return Part.IGNORE
        if forward.state is not State.LEARNED and self.step.are_gradients_gone(backward):
            self.forget()
        if backward not in (-1, self._last_begun):
            self._last_begun = backward
            call_after_backward(self._end_backward)
        return self.step.begin(forward, backward)

    def _end_backward(self) -> None:
        """Called when a backward pass has ended, and the model's activations are freed."""
        self.forecaster.end_backward()
        trained = next((p for p in parameters_of(self._base) if p.grad is not None), None)
        self.step.is_running = False
        self.step.trained = trained
        self.step.version = None if trained is None else version_of(trained)

    # ---- the penalty as a term: loss + λ Δ(z, c) ---------------------------------------------------------------------

    def term(self, z: Tensor, forward: Forward, labels: Labels | None) -> Tensor:
        """The weighted penalty, a scalar with a gradient for z; the forecaster learns in its backward pass."""
        if forward.has_term:
            fix = MIXED_LABELS if self.forecaster.reads_labels else ""
            raise ValueError(GIVEN_TWICE.format(self._name, fix))
        if forward.state is State.LEARNED:
            raise ValueError(TOO_LATE.format(self._name))
        forecaster = self.forecaster
        first_pull = forecaster.pull(forward, labels)
        weight = self.weight(self.step.number)
        alpha = self.alpha(self.step.number)
        has_weight = self.weight.constant != 0
        self.uses_term = True
        self._has_loaded_term = False
        self.step.has_term = True
        self.step.add(forward)
        forward.has_term = True
        shape = z.shape
        dtype = z.dtype
        name = self._name
        listener = weakref.ref(self)  # nor must a loss that the script keeps

        def value() -> Tensor:
            penalty = first_pull.value()
            return penalty * weight if has_weight else torch.zeros_like(penalty)

        def backward(s: Tensor) -> Tensor | None:
            algorithm = listener()
            if torch.is_grad_enabled():
                raise RuntimeError(ONCE.format(name))
            if algorithm is not None and algorithm.step.number != forward.step:
                raise RuntimeError(STALE.format(name))
            # What has learned from the first pull may have overwritten it.
            pull = first_pull if forward.state is State.OPEN else forecaster.pull(forward, labels)
            gradient = None
            if has_weight:
                gradient = pull.gradient(shape, dtype, forward.class_dim, s, weight)
            if algorithm is not None:
                figures = {"weight": weight, "alpha": alpha, "loss_scale": s, "penalty": pull.value}
                algorithm._learn_from_term(forward, pull, labels, s, figures)
            return gradient

        term: Tensor = _Term.apply(z, value, backward)
        return term

    def _learn_from_term(
        self, forward: Forward, pull: Pull, labels: Labels | None, s: Tensor, figures: dict[str, Any]
    ) -> None:
        part = self._begin(forward)
        if part is Part.IGNORE:
            return
        self.step.has_used_term = True
        self.last = figures
        if forward.logits.numel():
            # 0 times a scale that is not finite is nan. Classes that are masked, minus infinity, are finite here.
            is_finite = torch.add(forward.logits.amax(), s, alpha=0) < torch.inf
            if not _sync.may_sync(forward.step, s):
                labels, s = _only_if(is_finite, labels, s, forward.rows.shape[1])
            elif not bool(is_finite):
                self._miss(forward, part, figures["alpha"], is_finite=False)
                return
        self._learn(forward, part, pull, labels, s, figures["alpha"])

    # ---- learning ----------------------------------------------------------------------------------------------------

    def _learn(
        self, forward: Forward, part: Part, pull: Pull, labels: Labels | None, scale: Scale, alpha: float
    ) -> None:
        if part is Part.LEARN:
            forward.state = State.LEARNED
            self.forecaster.observe(forward, pull, labels, scale, alpha)

    def _miss(self, forward: Forward, part: Part, alpha: float, is_finite: bool) -> None:
        self.step.not_finite = self.step.not_finite or not is_finite
        if part is Part.LEARN and forward.state is State.OPEN:
            forward.state = State.MISSED
            self.forecaster.skip(forward, alpha)

    # ---- the step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Say that the wrapper steps the base optimizer in the block. If it raises, the step goes on as before."""
        self._is_stepping = True
        self._num_bypassed = 0
        try:
            yield
        finally:
            self._is_stepping = False
            self.step.is_observing = True

    def end_step(self) -> None:
        """Both networks have stepped."""
        step = self.step
        if _sync.is_sync_step(step.number):
            self.reader.num_skipped()
            self.forecaster.check_values()
        if not step.num_batches:
            self.last = {}  # those of an older batch
        self._num_idle = self._num_idle + 1 if self._is_idle() else 0
        if self._num_idle == IDLE_STEPS:
            warn_once(self._said, NOT_TRAINED.format(self._name))
        self.num_steps += 1
        self.step = Step(self.num_steps + 1)
        if step.not_finite:
            warn_once(self._said, NOT_FINITE)
        if self._has_loaded_term:
            self._has_loaded_term = False
            warn_once(self._said, NO_TERM.format(self._name))

    def _is_idle(self) -> bool:
        """Whether nothing was there to step on, though parameters are to be trained."""
        if self.step.num_forwards or self.step.num_batches or not self.hooks.attached:
            return False
        return trains_any(self._base) and not have_gradients(self._base)

    def note_zero_grad(self, set_to_none: bool) -> None:
        """The script clears the gradients. A term that no backward pass has come through is forgotten."""
        self.step.is_zeroed = not set_to_none
        self.step.has_term = False

    def forget_cleared(self) -> bool:
        """Before a step: forget the batches whose gradients are gone; say whether they are.

        Gradients that are there after they were cleared the script has put there, as gradient surgery does.
        """
        step = self.step
        if not step.are_gradients_gone() or have_gradients(self._base, other_than_zero=step.is_zeroed):
            return False
        self.forget()
        return True

    def forget_lost_term(self) -> bool:
        """Whether no penalty term of the step took part in a backward pass; then the next step starts without them."""
        is_lost = self.step.has_term and not self.step.has_used_term
        self.step.has_term = False
        return is_lost

    def forget(self) -> None:
        """Drop the batches of the step."""
        self.forecaster.forget()
        self.step = self.step.without_batches()

    def refuse_bypass(self) -> None:
        """Called before a step of the base optimizer that the wrapper does not take: raise in the second in a row."""
        if not self._is_stepping and self.step.num_batches:
            self.step.version = None
            self._count_bypass()

    def _refuse_other_steps(self) -> None:
        """Raise if the weights were changed twice without a step of the wrapper, by whatever method (SAM's)."""
        step = self.step
        if step.trained is None or step.version is None or self._is_stepping or not self.is_strict:
            return
        version = version_of(step.trained)
        if version != step.version:
            step.version = version
            self._count_bypass()

    def _count_bypass(self) -> None:
        self._num_bypassed += 1
        if self._num_bypassed > 1:
            raise RuntimeError(BYPASSED.format(name=self._name, base=type(self._base).__name__))

    # ---- hooks, copies and state -------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove the hooks."""
        self.hooks.remove()
        self.superseded = False

    def model_loaded(self, module: nn.Module, keys: Any) -> None:
        """Called when a state was loaded into the model."""
        self.forecaster.model_loaded()

    def replaced(self) -> None:
        """Make way for another optimizer on the same model."""
        self.hooks.remove()
        self.forget()
        self.superseded = True

    def load_state(self, num_steps: int, uses_term: bool, loss: dict[str, Any]) -> None:
        """Go on from a number of steps, as after loading a state."""
        self.reader.load_state(loss)
        self.num_steps = num_steps
        self.uses_term = self._has_loaded_term = uses_term
        self.step = Step(num_steps + 1)
        self.last = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last": {}, "step": self.step.without_forwards()}


def _only_if(counts: Tensor, labels: Labels | None, s: Tensor, num_classes: int) -> tuple[Labels | None, Tensor]:
    """Labels and loss scale of a batch that counts; else no row has a label, or without labels the scale is 0."""
    if labels is None:
        return None, s.where(counts, constant(0.0, s.device))
    none = num_classes if labels.rows.ndim == 1 else 0.0
    return labels._replace(rows=labels.rows.where(counts, constant(none, s.device))), s


class _Term(torch.autograd.Function):
    """A value whose gradient is written out."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Callable[[], Tensor], backward: Callable[[Tensor], Any]) -> Tensor:
        ctx.written = backward
        return value()

    @staticmethod
    def backward(ctx: Any, s: Tensor) -> Any:
        return ctx.written(s), None, None
