"""PS-KD: the last epoch's model softens the labels."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor

from examples.research.methods.base import Method, Setting, Trained, check_range, logits_of


class SelfDistillation(Method):
    r"""PS-KD, Progressive Self-Knowledge Distillation (Kim et al., ICCV 2021).

    .. math:: \ell = \text{CE}(z, (1 - \alpha_t)\, y + \alpha_t\, p^{t-1}), \quad \alpha_t = \alpha_T\, t / T

    t = 1..T counts epochs and :math:`p^{t-1}` is the softmax, at temperature 1, of the model as it was at the end of
    epoch t - 1, in evaluation mode and on the same augmented input. The first epoch has no teacher and is plain.

    Args:
        setting: what to train with; T is its number of epochs.
        alpha: :math:`\alpha_T` in [0, 1]. Default 0.8, as in the paper.

    Raises:
        ValueError: an option out of range.
    """

    cost = 4 / 3

    def __init__(self, setting: Setting, *, alpha: float = 0.8) -> None:
        check_range("alpha", alpha, 0, 1)
        super().__init__(setting, model=Trained(setting))
        self._alpha = alpha
        self.kept["teacher"] = copy.deepcopy(self.main.network).requires_grad_(False)

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        z = self.main.network(x)
        task = loss = self.criterion(z, y)
        if self.epoch > 0:
            alpha = self._alpha * (self.epoch + 1) / self.setting.epochs
            target = F.softmax(logits_of(self.kept["teacher"], x), dim=1)
            loss = (1 - alpha) * task + alpha * F.cross_entropy(z, target)  # cross-entropy is linear in its target
        self.main.update(loss)
        return task.detach()

    def end_epoch(self) -> None:
        super().end_epoch()
        self.kept["teacher"].load_state_dict(self.main.network.state_dict())
