r"""Algorithm 1 for one batch. Not in optimizer.py, since Lightning runs the optimizer's methods on another object."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from dcl_optim import _rng, _sync
from dcl_optim._hooks import ModuleHooks
from dcl_optim._optim import parameters_of
from dcl_optim._rng import RngState
from dcl_optim._torch import REPLICA, current_backward, fills_all_leaves, is_recorded, reaches_parameters, warn
from dcl_optim._validation import refuse_forward
from dcl_optim.batches import StepBatches
from dcl_optim.distances import Distance, to_rows
from dcl_optim.distributed import unwrapped
from dcl_optim.forecaster import Forecaster
from dcl_optim.forward import Forward
from dcl_optim.loss.outputs import LogitsFinder, conversion_source
from dcl_optim.loss.reader import Loss, LossReader
from dcl_optim.schedules import Checked
from dcl_optim.weights import FollowsFit


class _Term(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, on_backward: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.on_backward = on_backward
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, s: Tensor) -> Any:
        return ctx.on_backward(s), None, None


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
        loss: LossReader,
        distance: Distance,
        *,
        weight: Checked | FollowsFit,
        alpha: Checked,
        find_logits: LogitsFinder,
        count_eval: bool,
        strict: bool,
        name: str,
    ) -> None:
        self.model, self._base, self.forecaster, self.loss = model, base, forecaster, loss
        self.distance, self.weight, self.alpha = distance, weight, alpha
        self._find_logits, self._count_eval = find_logits, count_eval
        self.batches = StepBatches(base, name)
        self.steps = 0  # of the optimizer so far
        self.last: dict[str, Any] = {}  # figures of the last backward pass
        self.superseded = self._warned_not_finite = False
        self._rng_state: RngState | None = None  # before the training forward pass that runs
        self.hooks = ModuleHooks(self, model, unwrapped(model), base if strict else None)

    # ---- the forward pass: c = f(ω, x) -------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the model: forget a step that was skipped; note the RNG state that the model draws from."""
        self._rng_state = None
        if self.loss.ahead is not None:
            self.loss.before_forward()
        if not (module.training or self._count_eval) or not torch.is_grad_enabled() or is_recorded():
            return
        backward = current_backward()  # in which activation checkpointing recomputes a counted forward pass
        trained = next(filter(attrgetter("requires_grad"), parameters_of(self._base)), None)
        if trained is None or (backward != -1 and backward == self.batches.backward):
            return
        if not self.batches.forwards or REPLICA in vars(module):
            refuse_forward(self._base, module)
        if self.batches.count and self.batches.are_gone():
            self.forget()
        self.batches.cleared = False
        self._rng_state = _rng.capture(trained.device) if self.forecaster.replays_draws else {}
        self.forecaster.before_forward(args, kwargs, self._rng_state, self.steps + 1)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Called with the model's output: predict c, and wait for the gradient of the logits z."""
        rng_state, self._rng_state = self._rng_state, None
        if rng_state is None:
            return None
        z = self._find_logits(output)
        if not z.requires_grad:
            return None
        forward = Forward(z, self.steps + 1)
        self.loss.after_forward(forward, args, kwargs)
        self.forecaster.predict(args, kwargs, forward, rng_state)
        if output is not z:
            self._find_logits.warn_of_choice(output, z)
            output = self.loss.watch_own_loss(forward, z, output, kwargs)
            source = conversion_source(z)
            if source is not None:  # the loss may be that of the logits before they were converted
                node, index = source
                forward.nodes = node.next_functions
                node.register_prehook(functools.partial(self._at_source, forward, index))
        z.register_hook(functools.partial(self.on_gradient, forward))
        self.batches.forwards += 1
        self.batches.open = [reference for reference in self.batches.open if reference() is not None]
        self.batches.open.append(weakref.ref(forward))
        return output

    # ---- the backward pass: grad z + s λ ∂Δ(z, c)/∂z -----------------------------------------------------------------

    def on_gradient(self, forward: Forward, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the gradient of the logits: add that of the penalty (Equation 2)."""
        backward, batches = current_backward(), self.batches
        if gradient is None or not self.hooks.attached or forward.added_in == backward:
            return None
        if not (fills_all_leaves() or reaches_parameters(forward.nodes, self._base)):  # an attack asks for its inputs
            batches.backward = backward
            return None
        batches.backwards += 1
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the script's loss
            return None
        if batches.count and not forward.counted and batches.are_gone(backward):
            self.forget()
        if batches.terms:  # the loss has the penalty already
            return None
        forward.added_in = backward
        weight = self.weight(self.steps + 1) if self.weight.constant is None else self.weight.constant
        alpha = self.alpha(self.steps + 1) if self.alpha.constant is None else self.alpha.constant
        loss = self.loss.read(forward, gradient, several=batches.count > 0)
        batches.count, batches.backward, batches.cleared = batches.count + 1, backward, False
        first, forward.counted = batches.observing and not forward.counted, True
        self.last = {"penalty": math.nan, "weight": weight, "alpha": alpha, "loss_scale": loss.scale, "read": loss.read}
        if not loss.says:
            batches.not_finite |= not loss.finite
            if first:
                self.forecaster.skip(forward, alpha)
            return None
        penalty = self.forecaster.penalty(forward, loss, self.distance)
        self.last["penalty"] = figure = penalty._replace(rows=penalty.rows._replace(slope=penalty.rows.values))
        if batches.penalties is not None:
            batches.penalties.append(figure.value * (loss.scale * weight))
        regularized = penalty.added_to(gradient, loss.scale, weight, loss.class_dim) if weight else None
        if first:
            if isinstance(self.weight, FollowsFit):
                self.weight.count(forward.step, forward.rows, penalty.labels)
            self.forecaster.observe(forward, loss, penalty, self.distance, alpha)
        return regularized

    def _at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        gradient = self.on_gradient(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    # ---- the penalty as a term of the loss ---------------------------------------------------------------------------

    def penalty(self, z: Tensor, labels: Tensor | None) -> Tensor:
        """The weighted penalty of logits, whose backward pass lets the forecaster learn."""
        if not (torch.is_grad_enabled() and z.requires_grad):
            return torch.zeros((), dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        forward = self._forward_of(z) if labels is None else Forward(z, self.steps + 1)
        batches, weight, alpha = self.batches, self.weight(self.steps + 1), self.alpha(self.steps + 1)
        batches.terms += 1
        forward.rows = to_rows(z.detach(), 1)
        loss = Loss(1.0, labels, None, 1)
        found = self.forecaster.penalty(forward, loss, self.distance)
        value = found.value * weight
        state = {"seen": False}
        zeros = torch.zeros((), dtype=z.dtype, device=z.device).expand_as(z)
        slope = found.added_to(zeros, 1.0, weight, 1) if weight else None

        def backward(s: Tensor) -> Tensor | None:
            number = current_backward()
            gradient = None if slope is None else slope * s.to(slope.dtype)
            if not (fills_all_leaves() or reaches_parameters(forward.nodes, self._base)):
                return gradient
            if batches.count and not state["seen"] and batches.are_gone(number):
                terms = batches.terms
                self.forget()
                batches.terms = terms
            batches.count, batches.backward, batches.cleared = batches.count + 1, number, False
            batches.terms_used += 1
            first, state["seen"], forward.counted = batches.observing and not state["seen"], True, True
            self.last = {"penalty": found.value, "weight": weight, "alpha": alpha, "loss_scale": s, "read": None}
            finite = not _sync.may_sync(forward.step, s) or bool(torch.isfinite(s) & ~z.detach().sum().isnan())
            batches.not_finite |= not finite
            if first and finite:
                if isinstance(self.weight, FollowsFit):
                    self.weight.count(forward.step, forward.rows, found.labels)
                self.forecaster.observe(forward, loss._replace(scale=s), found, self.distance, alpha)
            elif first:
                self.forecaster.skip(forward, alpha)
            return gradient

        term: Tensor = _Term.apply(z, value, backward)
        return term

    def _forward_of(self, z: Tensor) -> Forward:
        forwards = [forward for reference in self.batches.open if (forward := reference()) is not None]
        for forward in forwards:
            if forward.output() is z:
                return forward
        fitting = [forward for forward in forwards if forward.logits.shape == z.shape and not forward.counted]
        if len(fitting) != 1:
            raise ValueError(
                f"penalty got logits of shape {tuple(z.shape)} that no training forward pass of the wrapped model "
                "returned since the last step: pass what the model returned"
            )
        return fitting[0]

    # ---- the step ----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Both networks have stepped."""
        self.steps += 1
        self.loss.end_step()
        if isinstance(self.weight, FollowsFit):
            self.weight.end_step(self.steps, self.forecaster.group, self.model)
        if self.batches.not_finite and not self._warned_not_finite:
            self._warned_not_finite = True
            warn(
                "non-finite logits or loss: a batch whose gradient of the logits is not finite gets no penalty, and "
                "neither the companion nor the prototypes learn from it"
            )

    def forget(self) -> None:
        """Drop the batches of the step; if the base optimizer evaluates the model in it, they were learned from."""
        if self.batches.stepping and self.batches.observing:
            self.batches.observing = False  # the gradients of its first evaluation: the next one is elsewhere
        else:
            self.forecaster.forget()
            self.batches.start()
            if isinstance(self.weight, FollowsFit):
                self.weight.forget()

    # ---- hooks, copies and state -------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove the hooks."""
        self.hooks.remove()
        self.superseded = False

    def model_loaded(self, module: nn.Module, keys: Any) -> None:
        """Called when a state was loaded into the model."""
        self.forecaster.follow("loaded")

    def replaced(self) -> None:
        """Make way for another optimizer on the same model."""
        self.hooks.remove()
        self.forecaster.forget()
        self.batches.start()
        self.superseded = True

    def load_state(self, steps: int, loss: dict[str, Any]) -> None:
        """Go on from a number of steps, as after loading a state."""
        self.loss.load_state(loss)
        self.batches.start()
        self.steps, self.last = steps, {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last": {}}
