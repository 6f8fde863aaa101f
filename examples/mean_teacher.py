"""A custom forecaster: an average of the model's weights in place of the companion (Mean Teacher).

docs/dev/extending.md explains it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.companion.replay import Replay
from dcl_optim.forecaster import Forecaster, Labels
from dcl_optim.layout import to_rows
from dcl_optim.optimizer import ForecastOptimizer
from dcl_optim.outputs import find_logits
from dcl_optim.progress import Forward
from dcl_optim.pull import Pull, Scale, pull_of


def of_probabilities(z: Tensor, c: Tensor) -> Tensor:
    """The distance of Mean Teacher: the mean squared difference of the softmaxes, (N,)."""
    return (z.softmax(1) - c.softmax(1)).square().mean(1)


def mean_so_far(step: int) -> float:
    """The average of all weights so far, and after 1,000 steps a moving average."""
    return min(0.999, (step - 1) / step)


class WeightAverage(Forecaster):
    r"""Forecasts by a moving average of the model's weights, which no gradient moves.

    .. math:: \omega_{t+1} = \alpha\,\omega_t + (1-\alpha)\,\theta_{t+1}

    Batch norm's statistics are the average's own, from the batches that it has seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.distance = of_probabilities
        self._model = model
        self.module = copy.deepcopy(model).requires_grad_(False)
        self._replay = Replay()
        self._has_observed = False  # since the last step

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step_number: int) -> None:
        self._replay.before_forward(args, kwargs, next(self._model.parameters()).device)

    def predict(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            output = self._replay.call(self.module, self._replay.arguments(args, kwargs))
        forward.prediction = find_logits(output)

    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        return pull_of(self.distance, forward.rows, to_rows(forward.prediction, forward.class_dim))

    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        self._has_observed = True

    def forget(self) -> None:
        self._has_observed = False

    def learn(self, alpha: float) -> None:
        if not self._has_observed:
            return
        with torch.no_grad():
            for average, weight in zip(self.module.parameters(), self._model.parameters(), strict=True):
                average.lerp_(weight, 1 - alpha)
        self._has_observed = False

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


class MeanTeacherOptimizer(ForecastOptimizer):
    """Hold the model to the average of its weights; ``optimizer.teacher`` is the network to deploy."""

    _name = "MeanTeacherOptimizer"
    forecaster: WeightAverage

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        *,
        weight: float = 10.0,
        alpha: float | Callable[[int], float] = mean_so_far,
    ) -> None:
        super().__init__(base_optimizer, model, lambda: WeightAverage(model), weight=weight, alpha=alpha)

    @property
    def teacher(self) -> nn.Module:
        """The average as a module."""
        return self.forecaster.module
