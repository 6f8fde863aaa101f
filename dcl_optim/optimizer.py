"""The optimizer both variants share: steps the base with the regularised gradient, lets the forecaster learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import interrupts
from dcl_optim.checks import check_integer, check_options
from dcl_optim.forecaster import Forecaster
from dcl_optim.functional import Distance, mse
from dcl_optim.labels import Labels
from dcl_optim.loss_scale import LossScale
from dcl_optim.regularizer import Regularizer
from dcl_optim.schedules import Schedule, checked
from dcl_optim.tap import find_logits
from dcl_optim.twin import unwrapped
from dcl_optim.wrapper import OptimizerWrapper, parameters_of

if TYPE_CHECKING:
    from typing_extensions import Self


class ForecastOptimizer(OptimizerWrapper):
    r"""Wraps an optimizer so that the model it trains is held to a forecaster's predictions.

    For each training forward of ``model`` (training mode, gradients on) the forecaster gives a forecast c. When the
    backward of that forward comes, :math:`s\lambda\,\partial\Delta(z, c)/\partial z` is added to the gradient of the
    logits z, s being what the loss was multiplied by. ``step`` steps the base optimizer and lets the forecaster learn.

    Subclasses choose the forecaster and have a ``_name`` of their own, under which ``state_dict`` keeps their part; the
    page "A forecaster of your own" builds one. One optimizer regularises a model at a time: wrapping the model again
    replaces the optimizer that did, whose ``step`` then says so. As a context manager it leaves the model as it was.

    Args:
        forecaster: builds the forecaster, once the arguments before it have been found good.
        distance: (z, c) -> scalar, of rows (N, K). Default :func:`~dcl_optim.functional.mse`.
        labels: reads the labels for a forecaster that needs them; None (default) for one that does not.
        base_optimizer, model, weight, alpha, criterion, loss_scale, logits, class_dim, strict: as in
            :class:`~dcl_optim.DCLOptimizer`; weight and alpha have no default here.

    Raises:
        ValueError, TypeError, RuntimeError: as DCLOptimizer.
    """

    _name = "ForecastOptimizer"

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        forecaster: Callable[[], Forecaster],
        distance: Distance = mse,
        *,
        weight: float | Schedule,
        alpha: float | Schedule,
        criterion: nn.Module | None = None,
        labels: Labels | None = None,
        loss_scale: Any = "auto",
        logits: Callable[[Any], Tensor] | None = None,
        class_dim: int = 1,
        strict: bool = True,
    ) -> None:
        super().__init__(base_optimizer)
        _check_modules(base_optimizer, model, criterion)
        schedules = {"weight": checked(weight, "weight"), "alpha": checked(alpha, "alpha", upper=1.0)}
        check_options(logits, strict)
        class_dim = check_integer("class_dim", class_dim)
        scale = LossScale(loss_scale)
        self._strict = strict
        self.model = model
        self.forecaster = forecaster()
        self._regularizer = Regularizer(
            model,
            base_optimizer,
            self.forecaster,
            distance,
            **schedules,
            criterion=criterion,
            labels=labels,
            loss_scale=scale,
            find_logits=logits or find_logits,
            class_dim=class_dim,
        )

    def detach(self) -> None:
        """Take the hooks off the model and the criterion; further steps are the base optimizer's alone."""
        self._regularizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the model as it was: :meth:`detach`."""
        self.detach()

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        r"""Step the base optimizer with the regularised gradient, then let the forecaster learn from the same batch.

        An interrupt (Ctrl-C) that arrives meanwhile takes effect after both, a second one at once.

        Args:
            closure: as in torch.optim: clears the gradients, computes the loss, calls backward and returns the loss.
                One that only computes and returns the loss is served too. A base that evaluates it several times
                (LBFGS) minimises loss plus penalty; the forecaster learns from the first evaluation, at
                :math:`\theta_t`.

        Returns:
            The loss of the first evaluation, without the penalty; None without a closure.

        Raises:
            RuntimeError: there are gradients, but no training forward of the model led to them; or another optimizer
                has wrapped the model since.
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be callable, got {type(closure).__name__}")
        self._require_charge()
        self.forecaster.prepare()
        if closure is None and self._is_dry_step():
            return self._dry_step()
        with interrupts.postponed():
            try:
                loss = self._step_without() if closure is None else self._step_with(closure)
                self.forecaster.step()
            finally:
                self.forecaster.rest()
            self._regularizer.counted = self._regularizer.carried = 0
            self._regularizer.steps += 1
        return loss

    def _step_without(self) -> Any:
        self._require_forward()
        self.forecaster.digest()
        self.forecaster.begin_step()
        self._regularizer.stepping = True
        try:
            return self.base.step()
        finally:
            self._regularizer.stepping, self._regularizer.learning = False, True

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        regularizer = self._regularizer
        losses: list[Any] = []
        observed = regularizer.counted > 0 and regularizer.has_gradients()

        def evaluate() -> Any:
            regularizer.penalties = []
            if observed and not regularizer.has_gradients():  # the base has moved the model and cleared them: SAM
                regularizer.learning = False
            loss = self._evaluate(closure)
            if not losses:
                self._require_forward()
                self.forecaster.digest()
                regularizer.learning = False
            losses.append(loss)
            if isinstance(self.base, torch.optim.LBFGS) and regularizer.penalties:  # it minimises the value
                return (loss.detach() if isinstance(loss, Tensor) else loss) + sum(regularizer.penalties)
            return loss

        try:
            self.base.step(evaluate)
        finally:
            regularizer.learning, regularizer.penalties = True, None
        return losses[0] if losses else None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and the backward that it left to us."""
        seen, backwards = self._regularizer.seen, self._regularizer.backwards
        loss = closure()
        left_to_us = self._regularizer.seen > seen and self._regularizer.backwards == backwards
        if left_to_us and isinstance(loss, Tensor) and loss.requires_grad:
            self.zero_grad()
            loss.backward()
        return loss

    def _is_dry_step(self) -> bool:
        """Whether this is a step of no length, as torch.distributed.checkpoint takes one to create the state."""
        if self._regularizer.carried or not self._regularizer.attached or not self._regularizer.has_gradients():
            return False
        return all(float(group.get("lr", 1.0)) == 0.0 for group in self.param_groups)

    def _dry_step(self) -> Any:
        loss = self.base.step()
        self.forecaster.create_state()
        return loss

    def _require_charge(self) -> None:
        if self._regularizer.replaced:
            raise RuntimeError(
                f"another optimizer has wrapped the model since this {self._name} did: step that one, or call "
                "detach() on this one to go on with its base optimizer alone"
            )

    def _require_forward(self) -> None:
        regularizer = self._regularizer
        if regularizer.carried or not (self._strict and regularizer.attached) or not regularizer.has_gradients():
            return
        raise RuntimeError(
            f"{self._name}.step found gradients, but no backward through a training forward of the wrapped "
            "model since the last step, so nothing was regularised. Usual reasons: the model was in eval mode or under "
            "no_grad; another object (a copy, an inner module) was called; the model was compiled, and it or its like "
            "called, before it was wrapped (wrap the compiled module); the loss is not made of the logits that were "
            "found in the model's output (pass logits=); backward ran with create_graph=True, or torch.func took the "
            "gradient. Pass strict=False to allow such steps"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as in torch.optim."""
        self._regularizer.cleared = True
        super().zero_grad(set_to_none)

    def _switch(self, mode: str) -> None:
        super()._switch(mode)
        self.forecaster.switch(mode)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer; the forecaster follows."""
        super().add_param_group(param_group)
        self.forecaster.groups_changed()

    # ---- what people look at, and what is saved ------------------------------------------------------------------

    @property
    def weight(self) -> float | Schedule:
        r""":math:`\lambda` as it was given; may be set at any time. Not in ``state_dict``."""
        return self._regularizer.weight.given

    @weight.setter
    def weight(self, value: float | Schedule) -> None:
        self._regularizer.weight = checked(value, "weight")

    @property
    def alpha(self) -> float | Schedule:
        r""":math:`\alpha` as it was given; may be set at any time. Not in ``state_dict``."""
        return self._regularizer.alpha.given

    @alpha.setter
    def alpha(self, value: float | Schedule) -> None:
        self._regularizer.alpha = checked(value, "alpha", upper=1.0)

    @property
    def penalty(self) -> float:
        r"""The last forward's :math:`\Delta(z, c)`, without :math:`\lambda`; nan before the first. Synchronises."""
        return float(self._regularizer.last.get("penalty", float("nan")))

    def logs(self) -> dict[str, float]:
        """Figures of the last backward for a logger: penalty, weight, alpha, loss_scale, step. Synchronises."""
        last = self._regularizer.last
        return {"step": float(self._regularizer.steps)} | {name: float(value) for name, value in last.items()}

    def __repr__(self) -> str:
        weight, alpha = self._regularizer.weight, self._regularizer.alpha
        model = type(unwrapped(self.model)).__name__
        return f"{self._name}(weight={weight}, alpha={alpha}, model={model})\n{self.base!r}"

    def _own_state(self) -> dict[str, Any]:
        return {"steps": self._regularizer.steps, "forecaster": self.forecaster.state_dict()}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"state_dict[{self._key!r}]['steps']={steps!r} must be a number of steps")
        self.forecaster.check_state(state.get("forecaster", {}))

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.forecaster.load_state_dict(state["forecaster"])
        self._regularizer.reset()
        if self._regularizer.labels is not None:
            self._regularizer.labels.forget()
        self._regularizer.steps = state["steps"]


def _check_modules(base: Optimizer, model: Any, criterion: Any) -> None:
    """Demand a model that the base optimizer trains, and a criterion whose calls hooks see."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if criterion is not None and not isinstance(criterion, nn.Module):
        raise TypeError(f"criterion must be a module that is called with (input, target), got {criterion!r}")
    if criterion is not None and type(criterion).__call__ is not nn.Module.__call__:
        raise TypeError(
            f"criterion's class {type(criterion).__name__} overrides __call__, which passes hooks by; pass loss_scale= "
            "(and the labels to DCP as targets= or by set_targets) instead"
        )
    if any(group.get("maximize") for group in base.param_groups) or getattr(base, "maximize", False):
        raise ValueError(
            "base_optimizer has maximize=True, which would maximise the penalty too; negate the loss instead"
        )
    if not {id(p) for p in parameters_of(base)} & {id(p) for p in model.parameters()}:
        raise ValueError("model shares no parameters with base_optimizer; pass the model that this optimizer trains")
