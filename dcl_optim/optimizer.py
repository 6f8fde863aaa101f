"""The optimizer both variants share: adds the penalty to the gradient, lets the forecaster learn."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import interrupts, random_state
from dcl_optim.forecaster import Forecaster, Forward
from dcl_optim.functional import Distance
from dcl_optim.loss_scale import LossScale
from dcl_optim.schedules import Schedule, checked
from dcl_optim.tap import Tap, conversion_source, find_logits, find_loss
from dcl_optim.twin import unwrapped
from dcl_optim.wrapper import OptimizerWrapper, parameters_of

if TYPE_CHECKING:
    from typing_extensions import Self


class ForecastOptimizer(OptimizerWrapper):
    r"""Wraps an optimizer so that the model it trains is held to a forecaster's predictions.

    For each training forward of ``model`` (training mode, gradients on) the forecaster gives a forecast c. When the
    backward of that forward comes, :math:`s\lambda\,\partial\Delta(z, c)/\partial z` is added to the gradient of the
    logits z, s being what the loss was multiplied by. ``step`` steps the base optimizer and lets the forecaster learn.

    Subclasses choose the forecaster: see :class:`~dcl_optim.DCLOptimizer` for the arguments they share.
    """

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        forecaster: Callable[[], Forecaster],
        distance: Distance,
        *,
        weight: float | Schedule,
        alpha: float | Schedule,
        criterion: nn.Module | None,
        loss_scale: Any,
        logits: Callable[[Any], Tensor] | None,
        class_dim: int,
        strict: bool,
    ) -> None:
        super().__init__(base_optimizer)
        _check_modules(base_optimizer, model, criterion)
        self.model = model
        self._distance = distance
        self._weight = checked(weight, "weight")
        self._alpha = checked(alpha, "alpha", upper=1.0)
        self._criterion = criterion
        self._loss_scale = LossScale(loss_scale)
        self._find_logits = logits or find_logits
        self._class_dim = class_dim
        self._strict = strict
        self._steps = 0
        self._reset()
        Tap.refuse_wrapped(model)  # before a companion is built
        self.forecaster = forecaster()
        self._attach()

    def _reset(self) -> None:
        self._outstanding: list[weakref.ref[Forward]] = []  # forwards whose backward has not come
        self._random_state: random_state.RandomState | None = None  # before the forward that is running
        self._next_targets: Tensor | None = None
        self._cleared = False  # zero_grad was called since the last backward
        self._counted = 0  # forwards whose backward came since the last step
        self._backward = -1  # autograd's number of the backward that came last
        self._seen = 0  # training forwards so far
        self._learning = True  # off while a closure is evaluated again within one step
        self._penalties: list[Tensor] | None = None  # weighted penalties of the closure that is running
        self._last: dict[str, Any] = {}

    def _attach(self) -> None:
        self._tap, self._attached = Tap(self), True
        self._tap.attach_to_model(self.model)
        if self._criterion is not None:
            self._tap.attach_to_criterion(self._criterion)

    def detach(self) -> None:
        """Take the hooks off the model and the criterion; further steps are the base optimizer's alone."""
        self._tap.remove()
        self._attached = False

    # ---- one batch, from the model's forward to its backward -----------------------------------------------------

    def _before_forward(self, training: bool) -> None:
        """Called by the tap: settle the previous batch, and remember where the random streams stand."""
        self._random_state = None
        if not training or not torch.is_grad_enabled() or self._is_left_alone():
            return
        if self._counted and self._learning and (self._cleared or not self._has_gradients()):
            self._drop_skipped_step()
        self._cleared = False
        self.forecaster.digest()
        device = self.param_groups[0]["params"][0].device
        self._random_state = random_state.capture(device) if self.forecaster.draws else {}

    def _is_left_alone(self) -> bool:
        """Whether checkpointing recomputes a forward that was counted, or torch.func differentiates it."""
        backward = torch._C._current_graph_task_id()
        if backward != -1 and backward == self._backward:
            return True
        return torch._C._functorch.peek_interpreter_stack() is not None

    def _after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called by the tap: make the forecast, and wait for the gradient of the logits."""
        state, self._random_state = self._random_state, None
        if state is None:
            return
        z = self._find_logits(output)
        if not z.requires_grad:
            return
        forward = Forward(z, self._class_dim)
        forward.targets, self._next_targets = self._next_targets, None
        self._label(forward, args, kwargs)
        self.forecaster.predict(args, kwargs, forward, state)
        self._wait_for_gradient(z, forward, find_loss(output))
        self._outstanding = [reference for reference in self._outstanding if _waits(reference())]
        self._outstanding.append(weakref.ref(forward))
        self._seen += 1

    def _wait_for_gradient(self, z: Tensor, forward: Forward, loss: Tensor | None) -> None:
        if loss is not None:
            loss.register_hook(forward.note_loss_scale)
        z.register_hook(functools.partial(self._add_penalty, forward))
        source = conversion_source(z)
        if source is not None:
            source[0].register_prehook(functools.partial(self._add_penalty_at_source, forward, source[1]))

    def _label(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read labels off the model's arguments. Default: none are needed."""

    def _add_penalty_at_source(self, forward: Forward, index: int, gradients: tuple[Tensor, ...]) -> Any:
        """As :meth:`_add_penalty`, for a loss that the model took from its logits before it converted them."""
        gradient = self._add_penalty(forward, gradients[index])
        return None if gradient is None else (*gradients[:index], gradient, *gradients[index + 1 :])

    def _add_penalty(self, forward: Forward, gradient: Tensor | None) -> Tensor | None:
        """Called by autograd with the loss's gradient of the logits: add the penalty's (Equation 2)."""
        if forward.counted or torch.is_grad_enabled():  # create_graph: a gradient that is part of the user's loss
            return None
        if gradient is None:  # the loss does not come through this output: true of a compiled model with its own loss
            if forward.model_loss_scale is None:
                return None
            gradient = forward.zeros()
        if self._counted and self._learning and self._cleared:
            self._drop_skipped_step()
        self._cleared = False
        weight, alpha = self._weight(self._steps + 1), self._alpha(self._steps + 1)
        scale = self._loss_scale.resolve(forward, gradient, several=self._counted > 0)
        value, slope = self.forecaster.penalty(forward, self._distance)
        if self._learning:
            self.forecaster.observe(forward, self._distance, alpha, scale)
        forward.counted = True
        self._counted += 1
        self._backward = torch._C._current_graph_task_id()
        self._last = {"penalty": value, "weight": weight, "alpha": alpha, "loss_scale": scale}
        if weight == 0:
            return None
        factor = scale * weight
        if self._penalties is not None:
            self._penalties.append(value * factor)
        return gradient + forward.unrows(slope * factor).to(gradient.dtype)

    def _after_criterion(self, logits: Any, targets: Any, loss: Tensor) -> None:
        """Called by the tap: take the labels, and read what the loss is multiplied by off its gradient."""
        waiting = [forward for forward in (reference() for reference in self._outstanding) if _waits(forward)]
        exact = [forward for forward in waiting if forward and forward.produced(logits)]
        if len(exact or waiting) > 1:
            raise RuntimeError(
                "the criterion was called and several forwards of the model wait for it: call it on each output as "
                "the model returned it, or delete the outputs that are not trained on"
            )
        for forward in exact or waiting:
            if forward is not None and forward.link(surely=bool(exact)):
                self._take_targets(forward, targets)
                loss.register_hook(functools.partial(forward.add_loss_scale, bool(exact)))

    def _take_targets(self, forward: Forward, targets: Any) -> None:
        """Read labels off the criterion's arguments. Default: none are needed."""

    def _drop_skipped_step(self) -> None:
        """Forget a step that never came, as when a gradient scaler found an infinity."""
        self._counted = 0
        self.forecaster.forget()

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in parameters_of(self))

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        r"""Step the base optimizer with the regularised gradient, then let the forecaster learn from the same batch.

        Args:
            closure: as in torch.optim: clears the gradients, computes the loss, calls backward and returns the loss.
                One that only computes and returns the loss is served too. A base that evaluates it several times
                (LBFGS) minimises loss plus penalty; the forecaster learns from the first evaluation, at
                :math:`\theta_t`.

        Returns:
            The loss of the first evaluation, without the penalty; None without a closure.

        Raises:
            RuntimeError: there are gradients, but no training forward of the model led to them.
        """
        self.forecaster.prepare()
        if closure is None and self._is_dry_step():
            return self._dry_step()
        with interrupts.postponed():
            if closure is None:
                self._require_forward()
                self.forecaster.digest()
                loss = self.base.step()
            else:
                loss = self._step_with(closure)
            self.forecaster.step()
            self._steps += 1
            self._counted = 0
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        losses: list[Any] = []
        observed = self._counted > 0 and self._has_gradients()

        def evaluate() -> Any:
            self._penalties = []
            if observed and not self._has_gradients():  # the base has moved the model and cleared them: SAM
                self._learning = False
            loss = self._evaluate(closure)
            if not losses:
                self._require_forward()
                self.forecaster.digest()
                self._learning = False
            losses.append(loss)
            minimises_value = isinstance(self.base, torch.optim.LBFGS) and self._penalties
            return loss.detach() + sum(self._penalties) if minimises_value else loss

        try:
            self.base.step(evaluate)
        finally:
            self._learning, self._penalties = True, None
        return losses[0] if losses else None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and the backward that it left to us."""
        seen, counted = self._seen, self._counted
        loss = closure()
        left_to_us = self._seen > seen and self._counted == counted
        if left_to_us and isinstance(loss, Tensor) and loss.requires_grad:
            self.zero_grad()
            loss.backward()
        return loss

    def _is_dry_step(self) -> bool:
        """Whether this is a step of no length, as torch.distributed.checkpoint takes one to create the state."""
        if self._counted or not self._attached or not self._has_gradients():
            return False
        return all(float(group.get("lr", 1.0)) == 0.0 for group in self.param_groups)

    def _dry_step(self) -> Any:
        loss = self.base.step()
        self.forecaster.create_state()
        return loss

    def _require_forward(self) -> None:
        if self._counted or not (self._strict and self._attached) or not self._has_gradients():
            return
        raise RuntimeError(
            f"{type(self).__name__}.step found gradients, but no backward through a training forward of the wrapped "
            "model since the last step, so nothing was regularised. Usual reasons: the model was in eval mode or under "
            "no_grad; another object (a copy, an inner module) was called; the model was compiled and called before it "
            "was wrapped; backward ran with create_graph=True, or torch.func took the gradient. Pass strict=False to "
            "allow such steps"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as in torch.optim."""
        self._cleared = True
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer; the forecaster follows."""
        super().add_param_group(param_group)
        self.forecaster.groups_changed()

    # ---- what people look at, and what is saved ------------------------------------------------------------------

    @property
    def penalty(self) -> float:
        r"""The last forward's :math:`\Delta(z, c)`, without :math:`\lambda`; nan before the first. Synchronises."""
        return float(self._last.get("penalty", float("nan")))

    def logs(self) -> dict[str, float]:
        """Figures of the last backward for a logger: penalty, weight, alpha, loss_scale, step. Synchronises."""
        return {"step": float(self._steps)} | {name: float(value) for name, value in self._last.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the model as it was: :meth:`detach`."""
        self.detach()

    def __repr__(self) -> str:
        model = type(unwrapped(self.model)).__name__
        return f"{type(self).__name__}(weight={self._weight}, alpha={self._alpha}, model={model})\n{self.base!r}"

    def _own_state(self) -> dict[str, Any]:
        return {"steps": self._steps, "forecaster": self.forecaster.state_dict()}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"state_dict[{self._key!r}]['steps']={steps!r} must be a number of steps")
        self.forecaster.check_state(state.get("forecaster", {}))

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._reset()
        self.forecaster.load_state_dict(state["forecaster"])
        self._steps = state["steps"]

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_tap", "_outstanding", "_random_state", "_next_targets", "_penalties", "_last"}
        return {key: value for key, value in super().__getstate__().items() if key not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        super().__setstate__(state)
        self._tap = Tap(self)
        if self._attached:
            self._attach()


def _waits(forward: Forward | None) -> bool:
    return forward is not None and not forward.counted


def _check_modules(base: Optimizer, model: Any, criterion: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if criterion is not None and not isinstance(criterion, nn.Module):
        raise TypeError(f"criterion must be a module that is called with (input, target), got {criterion!r}")
    if not {id(p) for p in parameters_of(base)} & {id(p) for p in model.parameters()}:
        raise ValueError("model shares no parameters with base_optimizer; pass the model that this optimizer trains")
