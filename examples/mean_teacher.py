"""A custom forecaster: an average of the model's weights in place of the companion (Mean Teacher).

docs/dev/extending.md explains it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dcl_optim.companion.copying import copy_model
from dcl_optim.distances import Distance
from dcl_optim.distributed import unwrapped
from dcl_optim.forecaster import Forecaster, Forward, Loss, Penalty, RngState, replayed
from dcl_optim.loss.outputs import find_logits
from dcl_optim.optimizer import ForecastOptimizer


class WeightAverage(Forecaster):
    r"""Forecasts by a moving average of the model's weights, which no gradient moves.

    .. math:: \omega_{t+1} = \alpha\,\omega_t + (1-\alpha)\,\theta_{t+1}

    Batch norm's statistics are the average's own, from the batches that it has seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self.module = copy_model(self._model).requires_grad_(False)
        self._alpha: float | None = None  # of the forwards since the last step

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, rng_state: RngState) -> None:
        with torch.no_grad(), replayed(rng_state):
            forward.prediction = find_logits(self.module(*args, **kwargs))

    def observe(self, forward: Forward, loss: Loss, penalty: Penalty, distance: Distance, alpha: float) -> None:
        self._alpha = alpha

    def forget(self) -> None:
        self._alpha = None

    def step(self) -> None:
        if self._alpha is None:
            return
        with torch.no_grad():
            for average, weight in zip(self.module.parameters(), self._model.parameters(), strict=True):
                average.lerp_(weight, 1 - self._alpha)
        self._alpha = None

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


class MeanTeacherOptimizer(ForecastOptimizer):
    """Hold the model to the average of its weights; ``optimizer.teacher`` is the network to deploy."""

    _name = "MeanTeacherOptimizer"
    forecaster: WeightAverage

    def __init__(
        self, base_optimizer: torch.optim.Optimizer, model: nn.Module, *, weight: float = 0.1, alpha: float = 0.99
    ) -> None:
        super().__init__(base_optimizer, model, lambda: WeightAverage(model), weight=weight, alpha=alpha)

    @property
    def teacher(self) -> nn.Module:
        """The average as a module."""
        return self.forecaster.module
