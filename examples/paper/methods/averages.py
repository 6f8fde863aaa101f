"""Methods with a moving average of the weights: the average as the model, and the average as a teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from examples.paper.methods.base import Method, Setting, Trained, check_count, check_range, frozen_statistics, predictor


def moving_average(network: nn.Module, decay: float, warm_up: bool) -> AveragedModel:
    r"""Give the exponential moving average of a network's parameters and buffers.

    .. math:: \bar\theta_n = d_n \bar\theta_{n-1} + (1 - d_n)\, \theta_n, \quad \bar\theta_0 = \theta_0

    n counts the updates from 0. :math:`d_n` is the decay; with ``warm_up`` the smaller of it and n / (n + 1), which is
    the plain mean of all so far. Batch norm's statistics are averaged as the weights are; integers are copied.
    """

    @torch.no_grad()
    def update(averages: Sequence[Tensor], values: Sequence[Tensor], count: Tensor | int) -> None:
        kept = min(decay, int(count) / (int(count) + 1)) if warm_up else decay
        for average, value in zip(averages, values, strict=True):
            if average.is_floating_point():
                average.lerp_(value, 1 - kept)
            else:
                average.copy_(value)

    updates: Any = update
    return AveragedModel(network, multi_avg_fn=updates, use_buffers=True).requires_grad_(False)


class _Averaged(Method):
    """One network and its moving average, which is the one to deploy."""

    _name: str

    def __init__(self, setting: Setting, decay: float, warm_up: bool) -> None:
        check_range("decay", decay, 0, 1)
        super().__init__(setting, model=Trained(setting))
        self._average = moving_average(self.main.network, decay, warm_up)
        self.kept[self._name] = self._average

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), self._name: self._average.module}

    def predictors(self) -> dict[str, Any]:
        return {self._name: predictor(self._average.module), **super().predictors()}

    def _update(self, loss: Tensor) -> None:
        self.main.update(loss)
        self._average.update_parameters(self.main.network)


class WeightAverage(_Averaged):
    """An exponential moving average of the weights, updated at each step; the average is deployed.

    Its batch-norm statistics are the average of the model's, as timm has it: no further pass over the data.

    Args:
        setting: what to train with.
        decay: in [0, 1]. Default 0.999, that is about 1,000 steps: take less, or ``warm_up``, in a short run.
        warm_up: let the average be the plain mean of all weights so far until the decay is reached. Default False.

    Raises:
        ValueError: an option out of range.
    """

    _name = "average"

    def __init__(self, setting: Setting, *, decay: float = 0.999, warm_up: bool = False) -> None:
        super().__init__(setting, decay, warm_up)

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        loss = self.criterion(self.main.network(x), y)
        self._update(loss)
        return loss.detach()


class MeanTeacher(_Averaged):
    r"""Mean Teacher (Tarvainen and Valpola, NeurIPS 2017), with all samples labelled.

    .. math:: \ell = \text{CE}(z, y) + w_t\, \text{mean}_{i,k} (p_{ik} - \bar p_{ik})^2,
        \quad w_t = w \exp\!\big(-5\, (1 - \min(1, t / r))^2\big)

    p and :math:`\bar p` are the softmaxes of the model and of the teacher, the moving average of its weights, on the
    same input, both in training mode with random draws of their own (dropout) and the batch's own statistics; t counts
    finished epochs and the mean is over batch and classes, as in the authors' code. The teacher's running statistics
    are the average of the model's. The teacher is deployed.

    Args:
        setting: what to train with.
        weight: :math:`w \ge 0`. Default 100, as in the authors' CIFAR-10 runs.
        ramp_up: r in epochs, at least 0. Default 5, theirs too; 0 for the whole weight at once.
        decay: of the average, in [0, 1], with warm-up. Default 0.999.

    Raises:
        ValueError: an option out of range.
    """

    cost = 4 / 3
    _name = "teacher"

    def __init__(self, setting: Setting, *, weight: float = 100.0, ramp_up: int = 5, decay: float = 0.999) -> None:
        check_range("weight", weight, 0)
        check_count("ramp_up", ramp_up, 0)
        super().__init__(setting, decay, warm_up=True)
        self._weight, self._ramp_up = weight, ramp_up

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        z = self.main.network(x)
        with torch.no_grad(), frozen_statistics(self._average):
            teacher = self._average(x)
        loss = self.criterion(z, y)
        consistency = F.mse_loss(F.softmax(z, dim=1), F.softmax(teacher, dim=1))
        self._update(loss + self._ramped() * consistency)
        return loss.detach()

    def _ramped(self) -> float:
        missing = max(0.0, 1 - self.epoch / self._ramp_up) if self._ramp_up else 0.0
        return self._weight * math.exp(-5 * missing**2)
