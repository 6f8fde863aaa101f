r"""Rules for the penalty's weight that were compared with :class:`~dcl_optim.AutoWeight`: see docs/results/gains.md."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcl_optim import AutoWeight, DCPOptimizer
from dcl_optim.distances import Distance
from dcl_optim.forecaster import Forward, Loss, Penalty
from dcl_optim.prototypes import SOME_ROWS, Prototypes

DECAY = 0.98


class Rule:
    r"""A schedule that follows a running mean m of what each training step shows: :math:`b\max(\lambda_0, m^k)`.

    Args:
        signal: ``"accuracy"`` of the batch, or ``"loss"``: m is exp(-mean loss), the geometric mean of the labels'
            probabilities.
        power: k.
        floor: :math:`\lambda_0`.
        factor: b.
    """

    def __init__(self, signal: str, power: float, floor: float = 0.1, factor: float = 1.0) -> None:
        self._signal, self._factor = signal, factor
        self._weight_at = partial(AutoWeight(floor, power).at, num_classes=100)
        self._sum = self._weight = 0.0

    def update(self, z: Tensor, y: Tensor, loss: Tensor) -> None:
        """Take note of a step: logits, class indices and loss."""
        found = (z.argmax(1) == y).float().mean() if self._signal == "accuracy" else loss
        self._sum, self._weight = DECAY * self._sum + float(found), DECAY * self._weight + 1.0

    def __call__(self, step: int) -> float:
        if not self._weight:
            return self._factor * self._weight_at(0.0)
        mean = self._sum / self._weight
        return self._factor * self._weight_at(math.exp(-mean) if self._signal == "loss" else mean)

    def state_dict(self) -> dict[str, Any]:
        """The running mean."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave."""
        self._sum, self._weight = state["sum"], state["weight"]


class BatchMeans(Prototypes):
    r"""Prototypes that are debiased running means of batch means: :math:`n \leftarrow \alpha n + 1`."""

    def _divisors(self, counts: Tensor) -> tuple[Tensor, float]:
        seen = counts > SOME_ROWS
        self._numbers = torch.where(seen, self._alpha * self._numbers + 1.0, self._numbers)
        return counts * self._numbers, 1.0


class WeightsByClass(Prototypes):
    r"""Prototypes whose rows weigh :math:`\max(0.1, a_k^6)`, a_k being the accuracy on the rows of their class.

    A running mean over the batches with the class, of the prototypes' own decay.
    """

    def penalty(self, forward: Forward, loss: Loss, distance: Distance) -> Penalty:
        penalty = super().penalty(forward, loss, distance)
        labels = penalty.labels
        assert labels is not None
        right = (forward.rows.argmax(1) == labels).to(self._rows)
        accuracy = self._right / self._numbers.clamp(min=1e-6)
        self._found = labels, right
        weights = accuracy.pow(6).clamp(min=0.1, max=1.0).index_select(0, labels)
        return penalty._replace(weights=weights if penalty.weights is None else weights * penalty.weights)

    def _divisors(self, counts: Tensor) -> tuple[Tensor, float]:
        labels, right = self._found
        hits = torch.zeros_like(counts).index_add_(0, labels, right)
        self._right = torch.where(counts > SOME_ROWS, self._alpha * self._right + hits, self._right)
        return super()._divisors(counts)

    def _create(self, num_classes: int, like: Tensor) -> None:
        super()._create(num_classes, like)
        self._right = torch.zeros_like(self._numbers)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"right": self._right}

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state({name: state[name] for name in ("values", "numbers")})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._right = state["right"].to(self._right)


class BatchMeansOptimizer(DCPOptimizer):
    """DCP with :class:`BatchMeans`."""

    _prototypes = BatchMeans


class WeightsByClassOptimizer(DCPOptimizer):
    """DCP with :class:`WeightsByClass`."""

    _prototypes = WeightsByClass


OPTIMIZERS: dict[str | None, type[DCPOptimizer]] = {
    None: DCPOptimizer,
    "batch means": BatchMeansOptimizer,
    "weights by class": WeightsByClassOptimizer,
}
