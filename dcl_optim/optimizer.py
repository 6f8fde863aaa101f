"""The optimizer that both variants share: one step of Algorithm 1 around any base optimizer.

dcl_optim/reference.py has both methods on one screen each, tests/reference.py any training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.algorithm import Algorithm, Logged
from dcl_optim.forecaster import Forecaster
from dcl_optim.loss.reader import SAVED
from dcl_optim.penalty.distances import name_of
from dcl_optim.penalty.weights import AutoWeight, Checked, Schedule, Weight, resolve_weight
from dcl_optim.progress import Stage
from dcl_optim.pytorch.arguments import check_arguments, check_state
from dcl_optim.pytorch.outputs import find_logits
from dcl_optim.pytorch.ranks import unwrapped
from dcl_optim.pytorch.wrapper import OptimizerWrapper


class ForecastOptimizer(OptimizerWrapper):
    r"""Wraps an optimizer so that the model it trains is pulled toward a forecaster's predictions.

    For each training forward pass of ``model`` the forecaster predicts c. The backward pass adds
    :math:`s\lambda\,\partial\Delta(z, c)/\partial z` to the gradient of the logits z, where s is what the loss was
    multiplied by. ``step`` steps the base optimizer, and the forecaster learns. Subclasses choose the forecaster and a
    ``_name``, the key of their part in ``state_dict``.

    Args:
        base_optimizer: the optimizer to wrap.
        model: the model that it trains.
        forecaster: builds the forecaster, once the other arguments have been checked.
        weight: :math:`\lambda \ge 0`, a callable of the step (counted from 1), or with labels ``"auto"``.
        alpha: :math:`\alpha \in [0, 1]`, or a callable of the step.
        logits: function of the model's output that returns the logits tensor. None (default) for the output itself,
            ``output.logits``, ``output["logits"]``, ``output["out"]`` or the first tensor with classes in a tuple.
        strict: raise if a step finds gradients without a training forward pass, and if the weights were changed twice
            without a step. Default True.
    """

    _name = "ForecastOptimizer"

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        forecaster: Callable[[], Forecaster],
        *,
        weight: Weight,
        alpha: float | Schedule,
        logits: Callable[[Any], Tensor] | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__(base_optimizer)
        check_arguments(base_optimizer, model, logits)
        checked_alpha = Checked(alpha, "alpha", upper=1.0)
        self.model = model
        self.forecaster = forecaster()
        self._algorithm = Algorithm(
            model,
            base_optimizer,
            self.forecaster,
            weight=resolve_weight(weight, self.forecaster),
            alpha=checked_alpha,
            logits=logits,
            strict=strict,
            name=self._name,
        )

    def detach(self) -> None:
        """Remove the hooks from the model; further steps are those of the base optimizer alone."""
        self._algorithm.detach()

    # ---- the penalty as a term ---------------------------------------------------------------------------------------

    def _is_for_training(self, logits: Tensor) -> bool:
        """Whether the penalty of logits is to be trained on; raise if they are none."""
        find_logits(logits, lambda logits: logits)
        return torch.is_grad_enabled() and logits.requires_grad

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        r"""Step the base optimizer with the regularized gradient, then let the forecaster learn from the same batch.

        Args:
            closure: a function that evaluates the loss again, runs its backward pass and returns it, as in torch. With
                LBFGS add ``penalty(...)`` to the loss in it. Default: none.

        Returns:
            The loss of the first evaluation; without a closure, what the base optimizer returns.

        Raises:
            RuntimeError: there are gradients, but no backward pass through a training forward pass of the model, or
                ``penalty`` was called, and took part in no backward pass (``strict=False`` allows both); the base
                optimizer is LBFGS, and the loss in the closure has no term; or another optimizer has wrapped
                the model since.

        Warns:
            UserWarning: ``penalty`` was called in other steps, and not in this one, which has none.
        """
        algorithm = self._algorithm
        if closure is not None:
            result = algorithm.step_base(closure)
        elif algorithm.progress.stage is Stage.NOTHING and algorithm.is_no_training_step():
            return self.base.step()
        else:
            algorithm.before_step()
            result = self.base.step()  # θ, by the gradients of Equation 2
        algorithm.learn()  # ω, by those of Equation 4; or the prototypes
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, and forget the batches of a step that was left out.

        Args:
            set_to_none: set them to None (default) instead of zero.
        """
        self._algorithm.progress.gradients_cleared()
        self.base.zero_grad(set_to_none)

    def _switch(self, mode: str) -> None:
        super()._switch(mode)
        self.forecaster.switch(mode)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer; the forecaster follows at the next training forward pass."""
        self.base.add_param_group(param_group)

    # ---- settings, logs and state ------------------------------------------------------------------------------------

    @property
    def weight(self) -> float | Schedule | AutoWeight:
        r"""The given :math:`\lambda`; may be set at any time. Not in ``state_dict``; what auto has counted is."""
        return self._algorithm.weight.given

    @weight.setter
    def weight(self, value: Weight) -> None:
        self._algorithm.weight = resolve_weight(value, self.forecaster)

    @property
    def alpha(self) -> float | Schedule:
        r"""The given :math:`\alpha`; may be set at any time. Not in ``state_dict``."""
        return self._algorithm.alpha.given

    @alpha.setter
    def alpha(self, value: float | Schedule) -> None:
        self._algorithm.alpha = Checked(value, "alpha", upper=1.0)

    def logs(self, prefix: str = "") -> dict[str, float]:
        """Return the current values as floats, nan if not known yet. It copies from the device.

        Once there was a batch, the keys stay while the settings do.

        ``step`` (optimizer steps so far), ``penalty`` (without the weight), ``weight``, ``alpha`` and ``loss_scale``
        (what the loss was multiplied by; with the term what the term was) of the last backward pass, nan if its loss
        was not read, and after a step without one; ``skipped`` (forward passes since the optimizer was made that the
        line gave no penalty, and steps without a term where others have one); with an automatic weight and more than
        ten classes ``train_accuracy``.

        Args:
            prefix: put before each key, as in ``"dcl/"``. Default: nothing.
        """
        algorithm = self._algorithm
        algorithm.reader.count()
        last = dict.fromkeys(Logged._fields, math.nan)
        if algorithm.last is not None:
            last = algorithm.last._asdict() | {"penalty": algorithm.last.penalty()}
        values = {"step": algorithm.progress.number - 1, **last, "skipped": algorithm.reader.num_skipped}
        values |= self.forecaster.logs()
        return {f"{prefix}{name}": float(value) for name, value in values.items()}

    def __repr__(self) -> str:
        weight = "auto" if self.weight == AutoWeight() else self.weight
        distance = name_of(self.forecaster.distance)
        model = type(unwrapped(self.model)).__name__
        return f"{self._name}(weight={weight}, alpha={self.alpha}, distance={distance}, model={model})\n{self.base!r}"

    def _own_state(self) -> dict[str, Any]:
        algorithm = self._algorithm
        return {
            "steps": algorithm.progress.number - 1,
            "term": algorithm.uses_term,
            "loss": algorithm.reader.state(),
            "forecaster": self.forecaster.state_dict(),
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        check_state(state, {"steps": int, "term": bool, "loss": dict, "forecaster": dict}, self._name)
        check_state(state["loss"], SAVED, "loss")
        self.forecaster.load_state_dict(state["forecaster"])
        self._algorithm.load_state(state["steps"], state["term"], state["loss"])
