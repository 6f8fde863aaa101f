"""Snapshot ensembles: one run with a cyclic learning rate, the weights of each cycle's end."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import Tensor, nn

from examples.paper.methods.base import Method, Predictor, Setting, Trained, check_count, ensemble


class Snapshot(Method):
    r"""Snapshot ensembles (Huang et al., ICLR 2017, Equation 2): the mean of the snapshots' softmaxes.

    .. math:: \eta = \frac{\eta_0}{2} \big(\cos(\pi s) + 1\big)

    s in [0, 1) is the part of the cycle that is over, set anew at each step, :math:`\eta_0` the optimizer's initial
    learning rate: the setting's own schedule is not used. Cycle m of M ends after epoch ⌊m T / M⌋ of T; where M divides
    T this is the paper's schedule. Before the first snapshot the model itself is deployed.

    Args:
        setting: what to train with.
        estimators: M, the number of cycles and snapshots, in [1, epochs]. Default 2, as for the other ensembles.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, *, estimators: int = 2) -> None:
        check_count("estimators", estimators, 1, setting.epochs)
        super().__init__(setting, model=Trained(setting))
        self._ends = [number * setting.epochs // estimators for number in range(estimators + 1)]
        self._steps = 0
        copies = (copy.deepcopy(self.main.network).requires_grad_(False) for _ in range(estimators))
        self._snapshots = self.kept["snapshots"] = nn.ModuleList(copies)

    def predictors(self) -> dict[str, Predictor]:
        taken = sum(end <= self.epoch for end in self._ends[1:])
        deployed = list(self._snapshots)[:taken] or [self.main.network]
        return {"ensemble": ensemble(deployed), **super().predictors()}

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        factor = (math.cos(math.pi * self._passed()) + 1) / 2
        for group in self.main.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        loss = self.criterion(self.main.network(x), y)
        self.main.update(loss)
        self._steps += 1
        return loss.detach()

    def _passed(self) -> float:
        """The part of the current cycle that is over."""
        start, end = next((a, b) for a, b in zip(self._ends, self._ends[1:], strict=False) if self.epoch < b)
        return (self.epoch + min(1.0, self._steps / self.setting.steps_per_epoch) - start) / (end - start)

    def end_epoch(self) -> None:
        self.epoch += 1
        self._steps = 0
        if self.epoch in self._ends:
            number = self._ends.index(self.epoch) - 1
            self._snapshots[number].load_state_dict(self.main.network.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
