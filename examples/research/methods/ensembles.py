"""Ensembles: networks that are trained side by side, on all or on their own images, and the states of one network."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from examples.research.methods.base import Buffers, Method, Predictor, Setting, Trained, check_count, ensemble


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
        for number, trained in enumerate(self.trained.values()):
            z = trained.network(x)
            trained.update(self._loss(number, z, y, index))
            losses.append(self.criterion(z, y).detach())
        return torch.stack(losses).mean()

    def _loss(self, number: int, z: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """What the network of a number minimises."""
        loss: Tensor = self.criterion(z, y)
        return loss


class Bagging(Voting):
    r"""Bagging (Breiman, 1996): as :class:`Voting`, but each network has a bootstrap sample of the training images.

    .. math:: \ell_j = \frac{1}{B} \sum_i n_{ij}\, \text{CE}(z_i, y_i), \quad \sum_i n_{ij} = N

    The counts :math:`n_{ij}` of N draws with replacement are of torch's global generator, drawn at the start.

    Args:
        setting: what to train with.
        estimators: how many networks, at least 1. Default 2.
    """

    def __init__(self, setting: Setting, *, estimators: int = 2) -> None:
        super().__init__(setting, estimators=estimators)
        draws = torch.randint(setting.samples, (estimators, setting.samples))
        counts = torch.stack([row.bincount(minlength=setting.samples) for row in draws]).float()
        self._drawn = self.kept["bootstrap"] = Buffers(counts=counts).to(setting.device)

    def _loss(self, number: int, z: Tensor, y: Tensor, index: Tensor) -> Tensor:
        counts = self._drawn.get_buffer("counts")[number, index.to(y.device)]
        return (counts * F.cross_entropy(z, y, reduction="none")).mean()


class Snapshot(Method):
    """Snapshot ensembles (Huang et al., ICLR 2017): the states at the end of each cycle of the learning rate.

    The rate falls to 0 along a cosine as often as there are estimators, in all epochs together. Deployed is the mean of
    the softmaxes of the states so far; before the end of the first cycle that of the network as it is.

    Args:
        setting: what to train with; its own schedule is not used.
        estimators: how many states, at least 1; in fewer epochs than that one an epoch. Default 2.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, setting: Setting, *, estimators: int = 2) -> None:
        check_count("estimators", estimators, 1)
        super().__init__(setting, model=Trained(setting))
        self._cycle = max(1, setting.epochs // estimators)
        self.main.scheduler = CosineAnnealingWarmRestarts(self.main.optimizer, self._cycle)
        copies = [copy.deepcopy(self.main.network).requires_grad_(False) for _ in range(estimators)]
        self._states = self.kept["snapshots"] = nn.ModuleList(copies)

    def predictors(self) -> dict[str, Predictor]:
        made = min(self.epoch // self._cycle, len(self._states))
        return {"ensemble": ensemble(self._states[:made] or [self.main.network]), **super().predictors()}

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        loss = self.criterion(self.main.network(x), y)
        self.main.update(loss)
        return loss.detach()

    def end_epoch(self) -> None:
        super().end_epoch()
        number, over = divmod(self.epoch, self._cycle)
        if over == 0 and number <= len(self._states):
            self._states[number - 1].load_state_dict(self.main.network.state_dict())
