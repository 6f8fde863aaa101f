r"""Algorithm 1 for one batch, by both ways: the gradient of the logits (the line), and the penalty term.

Not in optimizer.py, since Lightning runs the optimizer's methods on another object.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from dcl_optim import _sync
from dcl_optim._hooks import Hook, ModuleHooks
from dcl_optim._optim import have_gradients, trains_any
from dcl_optim._torch import current_backward, is_recorded, reaches_parameters, version_of, warn_once
from dcl_optim._validation import refuse_replica
from dcl_optim.distributed import unwrapped
from dcl_optim.forecaster import Forecaster, Labels, Pull, Scale
from dcl_optim.loss.outputs import LogitsFinder, conversion_source
from dcl_optim.loss.reader import LossReader
from dcl_optim.schedules import Checked
from dcl_optim.step import Forward, Step
from dcl_optim.weights import FollowingFit

NOT_FINITE = (
    "non-finite logits or loss: a batch whose gradient of the logits is not finite gets no penalty, and neither the "
    "companion nor the prototypes learn from it"
)
BYPASSED = (
    "{name} wraps the optimizer, but the base {base} was stepped twice: prototypes and companion learn nothing.\n"
    "  Fix: call step() of the wrapper, optimizer = {name}(optimizer, model), also in trainers and schedulers. "
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
EDITED = (
    "the logits that {}.penalty got were edited in place between its call and the backward pass, so it would learn "
    "from other values.\n  Fix: edit a copy, logits.detach().clone()"
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
        find_logits: LogitsFinder,
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
        self.is_stepping = False  # whether the wrapper steps the base optimizer
        self._base = base
        self._find_logits = find_logits
        self._name = name
        self._is_training_forward = False  # whether the forward pass that runs is one
        self._num_bypassed = 0
        self._said: set[str] = set()
        self.hooks = ModuleHooks(self, model, unwrapped(model), base if strict else None)

    # ---- the forward pass: c = f(ω, x) -------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the model: forget a step that was skipped, and prepare the forecaster."""
        self._is_training_forward = self._is_training(module)
        if not self._is_training_forward:
            return
        refuse_replica(module)
        if self._are_gradients_gone():
            self.forget()
        self.step.is_cleared = False
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
        z = self._find_logits(output)
        if not z.requires_grad:
            return
        forward = Forward(z, self.step.number, self.reader.dim_of(z) or 1)
        self.forecaster.predict(forward, args, kwargs)
        listener = weakref.ref(self)  # logits that the script keeps must not keep the hooks on the model
        if output is not z:
            forward.choice = self._find_logits.choice_of(output, z)
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
        if gradient is None or not self._begin_batch(forward) or self.step.num_terms:
            return None
        if forward.choice is not None:
            self._find_logits.warn_of_choice(forward.choice)
        weight = self.weight(self.step.number)
        alpha = self.alpha(self.step.number)
        loss = self.reader.read(forward, gradient)
        is_read = loss.fits is not None
        if not is_read and loss.is_finite and forward.observed:  # a further loss of logits that have their penalty
            return None
        self.last = {"weight": weight, "alpha": alpha, "loss_scale": loss.scale, "fits": loss.fits}
        if not is_read:
            self._skip(forward, alpha, loss.is_finite)
            return None
        pull = self.forecaster.pull(forward, loss.labels)
        self.last["penalty"] = pull.without_slope()
        regularized = None
        if self.weight.constant != 0:
            regularized = pull.added_to(gradient, forward.class_dim, loss.scale, weight)
        self._observe(forward, pull, loss.labels, loss.scale, alpha)
        return regularized

    def _at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        gradient = self.on_gradient(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    def _begin_batch(self, forward: Forward) -> bool:
        """Count the backward pass that runs; return whether it brings these logits' gradient to trained parameters."""
        step = self.step
        backward = current_backward()
        if not self.hooks.attached or (forward.last_backward == backward and backward != -1):
            return False
        if not reaches_parameters(forward.nodes, self._base):  # as an attack asks for the gradient of its inputs
            step.last_backward = backward
            return False
        step.num_backwards += 1
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the script's loss
            return False
        if not forward.observed and self._are_gradients_gone(backward):
            self.forget()
            step = self.step
        forward.last_backward = backward
        step.last_backward = backward
        step.num_batches += 1
        step.is_cleared = False
        return True

    # ---- the penalty as a term: loss + λ Δ(z, c) ---------------------------------------------------------------------

    def term(self, z: Tensor, forward: Forward, labels: Labels | None) -> Tensor:
        """The weighted penalty, a scalar with a gradient for z; the forecaster learns in its backward pass."""
        if self.step.has_term_of(z):
            fix = MIXED_LABELS if self.forecaster.reads_labels else ""
            raise ValueError(GIVEN_TWICE.format(self._name, fix))
        by_the_line = self.step.forward_of(z)
        if forward.observed or (by_the_line is not None and by_the_line.observed):
            raise ValueError(TOO_LATE.format(self._name))
        weight = self.weight(self.step.number)
        alpha = self.alpha(self.step.number)
        has_weight = self.weight.constant != 0
        forecaster = self.forecaster
        first_pull = forecaster.pull(forward, labels)
        self.step.add_term(z)
        shape = z.shape
        dtype = z.dtype
        listener = weakref.ref(self)  # nor must a loss that the script keeps

        def backward(s: Tensor) -> Tensor | None:
            # What has learned from the first pull may have overwritten it.
            pull = forecaster.pull(forward, labels) if forward.observed else first_pull
            gradient = None
            if has_weight:
                gradient = pull.gradient(shape, dtype, forward.class_dim, s, weight)
            algorithm = listener()
            if algorithm is not None:
                algorithm._learn_from_term(forward, pull, labels, s, alpha, weight)
            return gradient

        value = first_pull.value * weight if has_weight else first_pull.value.new_zeros(())
        term: Tensor = _Term.apply(z, value, backward)
        return term

    def _learn_from_term(
        self, forward: Forward, pull: Pull, labels: Labels | None, s: Tensor, alpha: float, weight: Scale
    ) -> None:
        if version_of(forward.logits) != forward.logits_version:
            raise RuntimeError(EDITED.format(self._name))
        is_first_use = forward.last_backward == -1
        if not self._begin_batch(forward):
            return
        self.step.num_terms_used += is_first_use
        self.last = {"weight": weight, "alpha": alpha, "loss_scale": s, "penalty": pull.without_slope()}
        if _sync.may_sync(forward.step, s) and not bool((forward.logits < torch.inf).all() & (s.abs() < torch.inf)):
            self._skip(forward, alpha, is_finite=False)
        else:
            self._observe(forward, pull, labels, s, alpha)

    # ---- learning ----------------------------------------------------------------------------------------------------

    def _observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        if self.step.is_observing and not forward.observed:
            forward.observed = True
            self.forecaster.observe(forward, pull, labels, scale, alpha)

    def _skip(self, forward: Forward, alpha: float, is_finite: bool) -> None:
        self.step.not_finite = self.step.not_finite or not is_finite
        if self.step.is_observing and not forward.observed:
            forward.observed = not is_finite  # else another loss of these logits may be read
            self.forecaster.skip(forward, alpha)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The wrapper steps the base optimizer."""
        self.is_stepping = True
        self._num_bypassed = 0

    def end_step(self) -> None:
        """Both networks have stepped."""
        not_finite = self.step.not_finite
        if _sync.is_sync_step(self.step.number):
            _sync.read_together([*self.reader.questions(), *self.forecaster.questions()])
        self.num_steps += 1
        self.step = Step(self.num_steps + 1)
        if not_finite:
            warn_once(self._said, NOT_FINITE)

    def leave_step(self) -> None:
        """The base optimizer has stepped, or its step has raised: then the step goes on as before."""
        self.is_stepping = False
        self.step.is_observing = True

    def observe_no_more(self) -> None:
        """Further evaluations of a closure are elsewhere, or were observed already."""
        self.step.is_observing = False

    def note_zero_grad(self) -> None:
        """The script clears the gradients."""
        self.step.is_cleared = True

    def _are_gradients_gone(self, backward: int = -1) -> bool:
        """Whether ``zero_grad`` cleared gradients without a step, as where a gradient scaler skips it.

        That no parameter has a gradient is no sign: FSDP2 has none before it communicates, nor has a backward pass that
        ends at detached logits.

        Args:
            backward: the backward pass that runs; batches that it has brought have no gradients yet.
        """
        step = self.step
        return step.is_cleared and step.num_batches > 0 and step.is_observing and step.last_backward != backward

    def forget_cleared(self) -> bool:
        """Before a step: forget the batches whose gradients are gone; say whether they are.

        Gradients that are there after ``zero_grad`` the script has put there, as gradient surgery does.
        """
        step = self.step
        if not step.num_batches:
            return False
        if have_gradients(self._base, other_than_zero=step.is_cleared):
            return False
        self.forget()
        return True

    def forget_lost_terms(self) -> bool:
        """Whether no penalty term of the step took part in a backward pass; then the next step starts without them."""
        are_lost = self.step.num_terms > 0 and self.step.num_terms_used == 0
        if are_lost:
            self.step.num_terms = 0
        return are_lost

    def forget(self) -> None:
        """Drop the batches of the step."""
        self.forecaster.forget()
        self.step = self.step.without_batches()

    def refuse_bypass(self) -> None:
        """Called before a step of the base optimizer that the wrapper does not take: raise in the second in a row."""
        if self.is_stepping:
            return
        if self.step.num_batches:
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

    def load_state(self, num_steps: int, loss: dict[str, Any]) -> None:
        """Go on from a number of steps, as after loading a state."""
        self.reader.load_state(loss)
        self.num_steps = num_steps
        self.step = Step(num_steps + 1)
        self.last = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last": {}, "step": self.step.without_forwards()}


class _Term(torch.autograd.Function):
    """A value whose gradient is written out."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, backward: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.of_z = backward
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, s: Tensor) -> Any:
        return ctx.of_z(s), None, None
