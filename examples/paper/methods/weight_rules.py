r"""Rules for the penalty's weight that were compared with :class:`~dcl_optim.AutoWeight`: see docs/results/gains.md."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

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
        self._signal, self._power, self._floor, self._factor = signal, power, floor, factor
        self._sum = self._weight = 0.0

    def update(self, z: Tensor, y: Tensor, loss: Tensor) -> None:
        """Take note of a step: logits, class indices and loss."""
        found = (z.argmax(1) == y).float().mean() if self._signal == "accuracy" else loss
        self._sum, self._weight = DECAY * self._sum + float(found), DECAY * self._weight + 1.0

    def __call__(self, step: int = 0) -> float:
        """The weight, in whichever step."""
        mean = self._sum / self._weight if self._weight else 0.0
        signal = math.exp(-mean) if self._signal == "loss" and self._weight else mean
        return self._factor * max(self._floor, signal**self._power)

    def state_dict(self) -> dict[str, Any]:
        """The running mean."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave."""
        self._sum, self._weight = state["sum"], state["weight"]
