"""An ensemble of networks that are trained side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.research.methods.base import Method, Predictor, Setting, Trained, check_count, ensemble


class Voting(Method):
    """Networks of own initialisations, trained independently on the same batches; the mean of their softmaxes.

    ``step`` returns the mean of their losses.

    Args:
        setting: what to train with.
        estimators: how many networks, at least 1. Default 2, the smaller ensemble of the paper's comparison. The cost
            is as many times plain training's.

    Raises:
        ValueError: an option out of range.
    """

    cost = 2.0

    def __init__(self, setting: Setting, *, estimators: int = 2) -> None:
        check_count("estimators", estimators, 1)
        names = ["model", *(f"model_{number}" for number in range(2, estimators + 1))]
        super().__init__(setting, **{name: Trained(setting) for name in names})
        self.cost = float(estimators)

    def predictors(self) -> dict[str, Predictor]:
        return {"ensemble": ensemble(list(self.networks().values())), **super().predictors()}

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        losses = []
        for trained in self.trained.values():
            loss = self.criterion(trained.network(x), y)
            trained.update(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()
