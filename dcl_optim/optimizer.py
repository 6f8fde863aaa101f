"""The optimizer that both variants share: one step of Algorithm 1 around any base optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._validation import check_arguments, check_flag, check_integer
from dcl_optim._wrapper import OptimizerWrapper
from dcl_optim.distances import Distance, DistanceName, resolve_distance
from dcl_optim.distributed import unwrapped
from dcl_optim.forecaster import Forecaster
from dcl_optim.hooks.labels import Labels
from dcl_optim.hooks.loss_scale import LossScale
from dcl_optim.hooks.outputs import finder
from dcl_optim.regularizer import Regularizer
from dcl_optim.schedules import Schedule, checked

if TYPE_CHECKING:
    from typing_extensions import Self


class ForecastOptimizer(OptimizerWrapper):
    r"""Wraps an optimizer so that the model it trains is held to a forecaster's predictions.

    For each training forward of ``model`` (training mode or ``count_eval``; gradients on) the forecaster gives a
    forecast c. When the backward of that forward comes, :math:`s\lambda\,\partial\Delta(z, c)/\partial z` is added to
    the gradient of the logits z, s being what the loss was multiplied by. ``step`` steps the base optimizer and lets
    the forecaster learn.

    Subclasses choose the forecaster and define a ``_name``, under which ``state_dict`` keeps their part; the
    page "A forecaster of your own" builds one. One optimizer regularises a model at a time: wrapping the model again
    supersedes the optimizer that did, whose ``step`` then says so. As a context manager it leaves the model as it was.

    Args:
        base_optimizer, model: as in :class:`~dcl_optim.DCLOptimizer`.
        forecaster: builds the forecaster, once the other arguments have been found good.
        distance: as in DCLOptimizer. Default ``"mse"``.
        labels: reads the labels for a forecaster that needs them; None (default) for one that does not.
        weight, alpha: as in DCLOptimizer, without a default.
        criterion, loss_scale, logits, class_dim, strict, count_eval: as in DCLOptimizer.

    Raises:
        ValueError, TypeError, RuntimeError: as DCLOptimizer.
    """

    _name = "ForecastOptimizer"

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        forecaster: Callable[[], Forecaster],
        distance: DistanceName | Distance = "mse",
        *,
        weight: float | Schedule,
        alpha: float | Schedule,
        criterion: nn.Module | None = None,
        labels: Labels | None = None,
        loss_scale: Any = "auto",
        logits: Callable[[Any], Tensor] | None = None,
        class_dim: int | None = None,
        strict: bool = True,
        count_eval: bool = False,
    ) -> None:
        super().__init__(base_optimizer)
        check_arguments(base_optimizer, model, criterion, logits)
        check_flag("strict", strict)
        check_flag("count_eval", count_eval)
        schedules = {"weight": checked(weight, "weight"), "alpha": checked(alpha, "alpha", upper=1.0)}
        class_dim = None if class_dim is None else check_integer("class_dim", class_dim)
        scale, distance = LossScale(loss_scale), resolve_distance(distance)
        self._strict, self.model = strict, model
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
            find_logits=finder(logits),
            class_dim=class_dim,
            count_eval=count_eval,
        )

    def detach(self) -> None:
        """Take the hooks off the model and the criterion; further steps are the base optimizer's alone."""
        self._regularizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the model as it was: :meth:`detach`."""
        self.detach()

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        r"""Step the base optimizer with the regularised gradient, then let the forecaster learn from the same batch.

        Args:
            closure: as in torch.optim: clears the gradients, computes the loss, calls backward and returns the loss.
                One that only computes and returns the loss is served too. A base that evaluates it several times
                (LBFGS) minimises loss plus penalty; the forecaster learns from the first evaluation, at
                :math:`\theta_t`.

        Returns:
            The loss of the first evaluation, without the penalty; what the base returns without a closure.

        Raises:
            RuntimeError: there are gradients, but no training forward of the model led to them; or another optimizer
                has wrapped the model since.
            TypeError: a closure that is not callable.
        """
        regularizer = self._regularizer
        if not regularizer.state.backwards or closure is not None:
            self._check_step(closure)
            if closure is None and self._is_of_no_length():
                self.forecaster.create_state()
                return self.base.step()
        try:
            if closure is None:
                regularizer.forget_cleared_batches()
                self.forecaster.backward()  # ω's gradients: ∇_ω Δ(c, α stop(c) + (1 - α) stop(z))  (Equation 4)
                regularizer.begin_base_step()
                loss = self.base.step()  # θ's, since the backward: ∇_θ [ℓ(z, y) + λ Δ(z, stop(c))]  (Equation 2)
            else:
                loss = self._step_with(closure)
            self.forecaster.step()  # ω
        except BaseException:
            regularizer.resume_observing()
            raise
        regularizer.start_new_step()
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """Step a base that evaluates the loss itself, once or several times."""
        regularizer = self._regularizer
        losses: list[Any] = []
        observed = regularizer.state.backwards > 0 and regularizer.has_gradients()

        def evaluate() -> Any:
            penalties = regularizer.collect_penalties()
            if observed and not regularizer.has_gradients():  # the base has moved the model and cleared them: SAM
                regularizer.stop_observing()
            loss = self._evaluate(closure)
            if not losses:
                self._require_forward()
                self.forecaster.backward()
                regularizer.stop_observing()
            losses.append(loss)
            if isinstance(self.base, torch.optim.LBFGS) and penalties:  # it minimises the value
                return (loss.detach() if isinstance(loss, Tensor) else loss) + sum(penalties)
            return loss

        self.base.step(evaluate)
        return losses[0] if losses else None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and the backward that it left to us."""
        forwards, backwards = self._regularizer.forwards, self._regularizer.backwards
        loss = closure()
        left_to_us = self._regularizer.forwards > forwards and self._regularizer.backwards == backwards
        if left_to_us and isinstance(loss, Tensor) and loss.requires_grad:
            self.zero_grad()
            loss.backward()
        return loss

    def _check_step(self, closure: Any) -> None:
        """Refuse a step before anything changes; one whose closure is to bring the gradients is checked there."""
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be callable, got {type(closure).__name__}")
        if self._regularizer.superseded:
            raise RuntimeError(
                f"another optimizer has wrapped the model since this {self._name} did: step that one, or call "
                "detach() on this one to go on with its base optimizer alone"
            )
        if closure is None and not self._is_of_no_length():
            self._require_forward()

    def _is_of_no_length(self) -> bool:
        """Whether this is no step, but what torch.distributed.checkpoint takes for one to create the state."""
        regularizer = self._regularizer
        if regularizer.state.backwards or not regularizer.attached or not regularizer.has_gradients():
            return False
        return not any(float(group.get("lr", 1.0)) for group in self.param_groups)

    def _require_forward(self) -> None:
        regularizer = self._regularizer
        if regularizer.state.backwards or not regularizer.has_gradients():
            return
        if not (self._strict and regularizer.attached):
            return
        if regularizer.steps and not regularizer.state.called and not regularizer.state.cleared:
            raise RuntimeError(
                f"{self._name}.step was called again, with the gradients of the last step still there: the wrapped "
                "model was not called since. Call step once for each backward; pass strict=False to allow such steps"
            )
        raise RuntimeError(
            f"{self._name}.step found gradients, but no backward through a training forward of the wrapped "
            "model since the last step, so nothing was regularised. Usual reasons: the model was in eval mode (pass "
            "count_eval=True to train it there) or under no_grad; another object (a copy, an inner module) was called; "
            "model.forward was called, or the model's class overrides __call__, so that its hooks did not run; the "
            "model was compiled, and it or its like called, before it was wrapped (wrap the compiled module); the loss "
            "is not made of the logits that were found in the model's output (pass logits=); backward ran with "
            "create_graph=True, or torch.func took the gradient. Pass strict=False to allow such steps"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as in torch.optim."""
        self._regularizer.gradients_cleared()
        self.base.zero_grad(set_to_none)

    def _switch(self, mode: str) -> None:
        super()._switch(mode)
        self.forecaster.set_mode(mode)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer; the forecaster follows.

        Raises:
            RuntimeError: the forecaster cannot; nothing is added then.
        """
        super().add_param_group(param_group)
        try:
            self.forecaster.base_changed()
        except RuntimeError:
            self.base.param_groups.pop()
            raise

    # ---- figures and state -------------------------------------------------------------------------------------------

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
        return float(self._regularizer.figures()["penalty"])

    def logs(self, prefix: str = "") -> dict[str, float]:
        """Figures for a logger, always the same keys: those of the last backward, and the forecaster's own.

        ``step`` (optimizer steps so far), ``penalty`` (without the weight), ``weight``, ``alpha`` and ``loss_scale``;
        with DCP ``prototype_norm``, the mean length of the prototypes that were seen. Synchronises.

        Args:
            prefix: put before each key, as in ``"dcl/"``. Default: nothing.

        Returns:
            Floats by their names; nan for what is not known yet.
        """
        regularizer = self._regularizer
        figures = {"step": regularizer.steps, **regularizer.figures(), **self.forecaster.figures()}
        return {f"{prefix}{name}": float(value) for name, value in figures.items()}

    def __repr__(self) -> str:
        settings = {**self._regularizer.settings(), "model": type(unwrapped(self.model)).__name__}
        shown = ", ".join(f"{name}={value}" for name, value in {**settings, **self.forecaster.settings()}.items())
        return f"{self._name}({shown})\n{self.base!r}"

    def _own_state(self) -> dict[str, Any]:
        regularizer = self._regularizer
        own = {"steps": regularizer.steps, "forecaster": self.forecaster.state_dict()}
        return own if regularizer.class_dim is None else own | {"class_dim": regularizer.class_dim}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"state_dict[{self._key!r}]['steps']={steps!r} must be a number of steps")
        self.forecaster.check_state(state.get("forecaster", {}))

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.forecaster.load_state_dict(state["forecaster"])
        self._regularizer.load_steps(state["steps"], state.get("class_dim"))
