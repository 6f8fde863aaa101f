"""Ensembles of networks that are trained side by side: voting and bagging."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.paper.methods.base import Buffers, Method, Predictor, Setting, Trained, check_count, ensemble


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


class Bagging(Voting):
    r"""Bagging (Breiman, 1996): as voting, but each network is trained on a bootstrap resample of the training set.

    .. math:: \ell_m = \frac{1}{B} \sum_i n_{mi}\, \text{CE}(z_i, y_i)

    :math:`n_{mi}` is how often sample i is in the resample of network m: as many draws with replacement as there are
    samples, made once from torch's global generator. Over an epoch the losses sum to those of training on the
    resample. Two things differ from drawing its batches: the resampled batch size varies around B, and batch norm
    sees every sample of the batch once, those with :math:`n_{mi} = 0` too. ``step`` returns the mean unweighted loss.

    Args:
        setting: what to train with.
        estimators: how many networks, at least 1. Default 2.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, *, estimators: int = 2) -> None:
        super().__init__(setting, estimators=estimators)
        draws = (torch.randint(setting.samples, (setting.samples,)) for _ in self.trained)
        counts = torch.stack([draw.bincount(minlength=setting.samples) for draw in draws])
        self._resample = self.kept["resample"] = Buffers(counts=counts.to(setting.device))
        self._losses = torch.nn.CrossEntropyLoss(reduction="none")

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        means = []
        for trained, counts in zip(self.trained.values(), self._resample.get_buffer("counts"), strict=True):
            losses = self._losses(trained.network(x), y)
            trained.update((counts[index.to(counts.device)] * losses).mean())
            means.append(losses.detach().mean())
        return torch.stack(means).mean()
