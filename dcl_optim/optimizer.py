"""The optimizer that both variants share: one step of Algorithm 1 around any base optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._validation import check_arguments, check_flag
from dcl_optim._wrapper import OptimizerWrapper
from dcl_optim.algorithm import Algorithm
from dcl_optim.distances import Distance, DistanceName, Function, resolve_distance
from dcl_optim.distributed import unwrapped
from dcl_optim.forecaster import Forecaster
from dcl_optim.loss.outputs import LogitsFinder
from dcl_optim.loss.reader import LossReader
from dcl_optim.schedules import Checked, Schedule
from dcl_optim.weights import AutoWeight, FollowsFit, Weight, check_weight_state, resolve_weight

if TYPE_CHECKING:
    from typing_extensions import Self

CALL_THE_MODEL = "call the model itself in training mode, the compiled one if it is compiled, before each step"
NOT_CALLED = (
    "model.forward, another method of the model, a part or a copy was called, its class overrides __call__, it was "
    "compiled and called before it was wrapped, or torch.func was used"
)
NOT_REGULARIZED = (
    "{}.step found gradients, but no backward through a training forward of the wrapped model since the last step.\n"
    "  Seen: {}.\n  Fix: {}. strict=False allows such steps. See docs/troubleshooting.md"
)
FIGURES = ("penalty", "weight", "alpha", "loss_scale")  # of each backward pass, for logs


class ForecastOptimizer(OptimizerWrapper):
    r"""Wraps an optimizer so that the model it trains is pulled towards a forecaster's predictions.

    For each training forward pass of ``model`` the forecaster predicts c. The backward pass adds
    :math:`s\lambda\,\partial\Delta(z, c)/\partial z` to the gradient of the logits z, where s is what the loss was
    multiplied by. ``step`` steps the base optimizer, and the forecaster learns. Subclasses choose the forecaster and a
    ``_name``, the key of their part in ``state_dict``. As a context manager it detaches at the end.

    Args:
        base_optimizer, model, weight, alpha, distance, logits, strict, count_eval: as in
            :class:`~dcl_optim.DCLOptimizer`; weight and alpha without a default.
        forecaster: builds the forecaster, once the other arguments have been checked.
        loss: reads loss scale and labels. None (default) for one that reads the scale.
    """

    _name = "ForecastOptimizer"

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        forecaster: Callable[[], Forecaster],
        distance: DistanceName | Distance | Function = "mse",
        *,
        weight: Weight,
        alpha: float | Schedule,
        loss: LossReader | None = None,
        logits: Callable[[Any], Tensor] | None = None,
        strict: bool = True,
        count_eval: bool = False,
    ) -> None:
        super().__init__(base_optimizer)
        check_arguments(base_optimizer, model, logits)
        check_flag("strict", strict)
        check_flag("count_eval", count_eval)
        loss = LossReader() if loss is None else loss
        checked_weight = resolve_weight(weight, loss.reads_labels)
        checked_alpha = Checked(alpha, "alpha", upper=1.0)
        distance = resolve_distance(distance)
        self._strict, self.model = strict, model
        self.forecaster = forecaster()
        self._algorithm = Algorithm(
            model,
            base_optimizer,
            self.forecaster,
            loss,
            distance,
            weight=checked_weight,
            alpha=checked_alpha,
            find_logits=LogitsFinder(logits),
            count_eval=count_eval,
            strict=strict,
            name=self._name,
        )

    def detach(self) -> None:
        """Take the hooks off the model; further steps are those of the base optimizer alone."""
        self._algorithm.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        r"""Step the base optimizer with the regularized gradient, then let the forecaster learn from the same batch.

        Args:
            closure: as in torch.optim; if it does not call ``backward()``, ``step`` does. LBFGS minimizes loss plus
                penalty.

        Returns:
            The loss of the first evaluation, without the penalty; without a closure, what the base optimizer returns.

        Raises:
            RuntimeError: there are gradients, but no backward pass through a training forward pass of the model.
        """
        if closure is not None:
            return self._step_with(closure)
        algorithm, batches = self._algorithm, self._algorithm.batches
        if batches.were_cleared():
            algorithm.forget()
        elif not batches.count:
            self._refuse_superseded()
            if self._is_state_initialization():
                self.forecaster.before_step(creates_state=True)
                return self.base.step()
            self._require_forward()
        with batches:
            self.forecaster.before_step()
            result = self.base.step()  # θ, by the gradients of Equation 2
            self.forecaster.step()  # ω, by those of Equation 4, or the prototypes
            algorithm.end_step()
        return result

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """Step a base optimizer that evaluates the loss itself, once or several times."""
        if not callable(closure):
            raise TypeError(f"closure must be callable, got {type(closure).__name__}")
        self._refuse_superseded()
        algorithm, batches = self._algorithm, self._algorithm.batches
        losses: list[Any] = []
        observed = batches.count > 0 and batches.have_gradients()

        def evaluate() -> Any:
            penalties = batches.penalties = []
            if observed and not batches.have_gradients():  # the base has moved the model and cleared them: SAM
                batches.observing = False
            loss = self._evaluate(closure)
            if not losses:
                self._require_forward()
                self.forecaster.before_step()
                batches.observing = False
            losses.append(loss)
            if isinstance(self.base, torch.optim.LBFGS) and penalties:  # it minimizes the value
                return (loss.detach() if isinstance(loss, Tensor) else loss) + sum(penalties)
            return loss

        with batches:
            batches.stepping, batches.observing = False, True
            self.base.step(evaluate)
            self.forecaster.step()
            algorithm.end_step()
        return losses[0] if losses else None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and the backward pass that it left to us."""
        batches = self._algorithm.batches
        forwards, backwards = batches.forwards, batches.backwards
        loss = closure()
        left_to_us = batches.forwards > forwards and batches.backwards == backwards
        if left_to_us and isinstance(loss, Tensor) and loss.requires_grad:
            self.zero_grad()
            loss.backward()
        return loss

    def _refuse_superseded(self) -> None:
        if self._algorithm.superseded:
            raise RuntimeError(
                f"another optimizer has wrapped the model since this {self._name} did: step that one, or call detach() "
                "on this one to go on with its base optimizer alone"
            )

    def _is_state_initialization(self) -> bool:
        """Whether this is no training step, but how torch.distributed.checkpoint creates the state: with lr 0."""
        if not self._algorithm.hooks.attached or not self._algorithm.batches.have_gradients():
            return False
        return not any(float(group.get("lr", 1.0)) for group in self.param_groups)

    def _require_forward(self) -> None:
        batches = self._algorithm.batches
        if batches.terms and not batches.terms_used:
            raise RuntimeError(
                f"{self._name}.penalty was called since the last step, but no backward pass went through what it "
                "returned.\n  Fix: add it to the loss, as in loss + optimizer.penalty(...)"
            )
        if batches.count or not batches.have_gradients() or not (self._strict and self._algorithm.hooks.attached):
            return
        raise RuntimeError(NOT_REGULARIZED.format(self._name, *self._cause()))

    def _cause(self) -> tuple[str, str]:
        """What was seen in a step without a batch, and the fix."""
        batches = self._algorithm.batches
        forwards, backwards = batches.forwards - batches.before[0], batches.backwards - batches.before[1]
        if backwards:
            return "a backward pass with create_graph=True", "run a backward pass without it before the step"
        if forwards:
            return "the gradient did not come through the logits that were found", "pass logits=<their function>"
        if not self.model.training:
            return "the model is in eval mode", "call model.train(), or pass count_eval=True"
        if self._algorithm.steps:
            return "step was called twice for one backward, or the model itself was not called", CALL_THE_MODEL
        return NOT_CALLED, CALL_THE_MODEL

    def _note_scaler(self, scaler: Any) -> None:
        self._algorithm.loss.note_scaler(scaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as in torch.optim."""
        self._algorithm.batches.cleared = True
        self.base.zero_grad(set_to_none)

    def _switch(self, mode: str) -> None:
        super()._switch(mode)
        self.forecaster.follow(mode)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer and the forecaster, or to none of them."""
        self.base.add_param_group(param_group)
        try:
            self.forecaster.follow("added")
        except Exception:
            self.base.param_groups.pop()
            raise

    @property
    def weight(self) -> float | Schedule | AutoWeight:
        r"""The given :math:`\lambda`; may be set at any time. Not in ``state_dict``; what auto has counted is."""
        return self._algorithm.weight.given

    @weight.setter
    def weight(self, value: Weight) -> None:
        self._algorithm.weight = resolve_weight(value, self._algorithm.loss.reads_labels)

    @property
    def alpha(self) -> float | Schedule:
        r"""The given :math:`\alpha`; may be set at any time. Not in ``state_dict``."""
        return self._algorithm.alpha.given

    @alpha.setter
    def alpha(self, value: float | Schedule) -> None:
        self._algorithm.alpha = Checked(value, "alpha", upper=1.0)

    def logs(self, prefix: str = "") -> dict[str, float]:
        """Return the current values as floats, nan for what is not known yet. The keys never change. Synchronizes.

        ``step`` (optimizer steps so far), ``penalty`` (without the weight), ``weight``, ``alpha`` and ``loss_scale`` of
        the last backward pass; with DCP ``skipped`` (batches without a penalty since the optimizer was made),
        ``prototype_norm`` and ``prototype_margin``; with an automatic weight ``train_accuracy``.

        Args:
            prefix: put before each key, as in ``"dcl/"``. Default: nothing.
        """
        last = dict.fromkeys(FIGURES, math.nan) | self._algorithm.last
        read, last["penalty"] = last.pop("read", None), getattr(last["penalty"], "value", last["penalty"])
        if read is not None and not math.isfinite(read) and last["loss_scale"] != 0:  # which the step did not wait for
            last["penalty"] = math.nan
        if self._algorithm.loss.reads_labels:
            last["skipped"] = self._algorithm.loss.skipped.total()
        if isinstance(self._algorithm.weight, FollowsFit):
            last["train_accuracy"] = self._algorithm.weight.accuracy
        figures = {"step": self._algorithm.steps, **last, **self.forecaster.figures()}
        return {f"{prefix}{name}": float(value) for name, value in figures.items()}

    def __repr__(self) -> str:
        algorithm, source = self._algorithm, self._algorithm.loss.source
        settings = {
            "weight": algorithm.weight,
            "alpha": algorithm.alpha,
            "distance": algorithm.distance,
            "loss_scale": source if isinstance(source, (str, int, float)) else type(source).__name__,
            "model": type(unwrapped(self.model)).__name__,
        }
        shown = ", ".join(f"{name}={value}" for name, value in (settings | self.forecaster.settings()).items())
        return f"{self._name}({shown})\n{self.base!r}"

    def _own_state(self) -> dict[str, Any]:
        algorithm = self._algorithm
        weight = algorithm.weight.state() if isinstance(algorithm.weight, FollowsFit) else None
        state = {"steps": algorithm.steps, "loss": algorithm.loss.state(), "weight": weight}
        return state | {"forecaster": self.forecaster.state_dict()}

    def _check_own_state(self, state: dict[str, Any]) -> None:
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"state_dict[{self._key!r}]['steps']={steps!r} must be a number of steps")
        self._algorithm.loss.check_state(state.get("loss"))
        check_weight_state(state.get("weight"))
        self.forecaster.check_state(state.get("forecaster", {}))

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.forecaster.load_state_dict(state["forecaster"])
        weight = self._algorithm.weight
        if isinstance(weight, FollowsFit) and state.get("weight"):
            weight.load_state(state["weight"])
        self._algorithm.load_state(state["steps"], state["loss"])
