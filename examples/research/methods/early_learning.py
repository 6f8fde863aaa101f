"""Early-learning regularization: predictions are held to the mean of the sample's earlier ones, for wrong labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 1e-4  # of a probability, as in the authors' code


class EarlyLearning(nn.Module):
    r"""The term of ELR (Liu et al., NeurIPS 2020, Equations 3 and 6).

    .. math:: \ell = \frac1B \sum_i \log\big(1 - \langle t_i, p_i \rangle\big), \quad
        t_i \leftarrow \beta\, t_i + (1 - \beta)\, p_i

    p is the softmax of the logits, cut to [1e-4, 1 - 1e-4], and what t takes of it adds up to 1. t starts at zero. As
    in the authors' code a step's term has the targets after its own update, through which no gradient goes.

    Args:
        samples: size of the training set; the targets take samples times classes numbers.
        classes: K.
        momentum: :math:`\beta \in [0, 1]`. They use 0.7 on CIFAR-10 and 0.9 on CIFAR-100.
    """

    targets: Tensor  # t, (samples, K)

    def __init__(self, samples: int, classes: int, momentum: float) -> None:
        super().__init__()
        self._momentum = momentum
        self.register_buffer("targets", torch.zeros(samples, classes))

    def forward(self, z: Tensor, index: Tensor) -> Tensor:
        """Give the term of logits (B, K) for the samples of these numbers (B,)."""
        inner = (self._updated(z.detach(), index) * _probabilities(z)).sum(1)
        return (1 - inner).log().mean()

    @torch.no_grad()
    def learn(self, z: Tensor, index: Tensor) -> None:
        """Take note of a step's logits, once a step."""
        self.targets[index] = self._updated(z, index)

    def _updated(self, z: Tensor, index: Tensor) -> Tensor:
        p = _probabilities(z)
        return self._momentum * self.targets[index] + (1 - self._momentum) * p / p.sum(1, keepdim=True)


def _probabilities(z: Tensor) -> Tensor:
    return F.softmax(z, dim=1).clamp(SMALLEST, 1 - SMALLEST)
