"""Mean Teacher: the model is held to the moving average of its weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import distances
from examples.mean_teacher import MeanTeacherOptimizer
from examples.research.methods.averages import moving_average
from examples.research.methods.base import (
    Method,
    Predictor,
    Setting,
    Trained,
    check_count,
    check_range,
    frozen_statistics,
    predictor,
)
from examples.research.methods.plain import Plain


class MeanTeacher(Method):
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
        of_logits: whether the distance is DCL's, of the logits, a control that has an average of the weights where DCL
            has a companion. Default False.

    Raises:
        ValueError: an option out of range.
    """

    cost = 4 / 3

    def __init__(
        self,
        setting: Setting,
        *,
        weight: float = 100.0,
        ramp_up: int = 5,
        decay: float = 0.999,
        of_logits: bool = False,
    ) -> None:
        check_range("weight", weight, 0)
        check_count("ramp_up", ramp_up, 0)
        check_range("decay", decay, 0, 1)
        super().__init__(setting, model=Trained(setting))
        self._teacher = moving_average(self.main.network, decay, warm_up=True)
        self.kept["teacher"] = self._teacher
        self._weight, self._ramp_up = weight, ramp_up
        self._of_logits = of_logits

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), "teacher": self._teacher.module}

    def predictors(self) -> dict[str, Predictor]:
        return {"teacher": predictor(self._teacher.module), **super().predictors()}

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        z = self.main.network(x)
        with torch.no_grad(), frozen_statistics(self._teacher):
            teacher = self._teacher(x)
        loss = self.criterion(z, y)
        if self._of_logits:
            consistency = distances.mse(z, teacher).mean()
        else:
            consistency = F.mse_loss(F.softmax(z, dim=1), F.softmax(teacher, dim=1))
        self.main.update(loss + self._ramped() * consistency)
        self._teacher.update_parameters(self.main.network)
        return loss.detach()

    def _ramped(self) -> float:
        missing = max(0.0, 1 - self.epoch / self._ramp_up) if self._ramp_up else 0.0
        return self._weight * math.exp(-5 * missing**2)


class MeanTeacherByLine(Plain):
    """Mean Teacher as ``examples/mean_teacher.py`` has it, by wrapping the optimizer; the teacher is deployed.

    Args:
        setting: what to train with.
        weight: of its penalty. Default 10.
        options: those of :class:`Plain`.
    """

    cost = 4 / 3

    def __init__(self, setting: Setting, *, weight: float = 10.0, **options: Any) -> None:
        super().__init__(setting, partial(MeanTeacherOptimizer, weight=weight), **options)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return ("weight", *super().options())

    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks(), "teacher": self.main.optimizer.teacher}

    def predictors(self) -> dict[str, Predictor]:
        return {"teacher": predictor(self.main.optimizer.teacher), "model": predictor(self.main.network)}
