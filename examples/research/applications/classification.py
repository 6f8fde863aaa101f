"""What the classifying applications share: where networks and images are, and how many answers are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Batches = Iterable[tuple[Tensor, Tensor]]


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a network; convolutions over few channels are faster with the channels last, on a CPU too."""
    return model.to(device).to(memory_format=torch.channels_last)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Move images to where :func:`placed` put the network."""
    return x.to(device, memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(
    model: nn.Module, batches: Batches, device: torch.device, logits: Callable[[Any], Tensor] = lambda output: output
) -> float:
    """Per cent of right answers; ``logits`` takes them out of what the model returns."""
    model.eval()
    right = [logits(model(x.to(device))).argmax(1).cpu() == y for x, y in batches]
    return 100 * float(torch.cat(right).double().mean())
