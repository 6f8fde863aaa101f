"""The moving average of the weights, a predictor beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def moving_average(network: nn.Module, decay: float, warm_up: bool) -> AveragedModel:
    r"""Give the exponential moving average of a network's parameters and buffers.

    .. math:: \bar\theta_n = d_n \bar\theta_{n-1} + (1 - d_n)\, \theta_n, \quad \bar\theta_0 = \theta_0

    n counts the updates from 0. :math:`d_n` is the decay; with ``warm_up`` the smaller of it and n / (n + 1), which is
    the plain mean of all so far. Batch norm's statistics are averaged as the weights are; integers are copied.
    """

    @torch.no_grad()
    def update(averages: Sequence[Tensor], values: Sequence[Tensor], count: Tensor | int) -> None:
        kept = min(decay, int(count) / (int(count) + 1)) if warm_up else decay
        for average, value in zip(averages, values, strict=True):
            if average.is_floating_point():
                average.lerp_(value, 1 - kept)
            else:
                average.copy_(value)

    updates: Any = update
    return AveragedModel(network, multi_avg_fn=updates, use_buffers=True).requires_grad_(False)
