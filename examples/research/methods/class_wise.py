"""CS-KD: predictions for two samples of one class are held together."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.research.methods.base import Method, Setting, Trained, check_range, divergence


class ClassWiseDistillation(Method):
    r"""CS-KD, class-wise self-knowledge distillation (Yun et al., CVPR 2020, Equation 3).

    .. math:: \ell = \text{CE}(z, y) + \frac{\lambda T^2}{B} \sum_i
        \text{KL}\big(\text{softmax}(z'_i / T) \,\Vert\, \text{softmax}(z_i / T)\big)

    :math:`z'_i` are the model's logits of a random training sample of i's class, perhaps i itself, with an augmentation
    of its own; no gradient reaches them. As in the authors' code that forward is in training mode, after the first one:
    dropout draws anew, and batch norm's running statistics see these samples too.

    Args:
        setting: what to train with.
        weight: :math:`\lambda \ge 0`. Default 1, the authors' for CIFAR-100; they take 3 for fine-grained data.
        temperature: T > 0. Default 4, theirs.

    Raises:
        ValueError: an option out of range.
    """

    cost = 4 / 3

    def __init__(self, setting: Setting, *, weight: float = 1.0, temperature: float = 4.0) -> None:
        check_range("weight", weight, 0)
        check_range("temperature", temperature, 1e-6)
        super().__init__(setting, model=Trained(setting))
        self._weight, self._temperature = weight, temperature

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        z = self.main.network(x)
        with torch.no_grad():
            partners = self.main.network(self.setting.partners(y))
        task = self.criterion(z, y)
        consistency = divergence(partners, z, self._temperature).mean()
        self.main.update(task + self._weight * self._temperature**2 * consistency)
        return task.detach()
