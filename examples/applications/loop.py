"""The loop of fine-tuning and of its pretraining, the same with and without DCL."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from examples.applications import adapters
from examples.applications.classification import moved
from examples.paper.datasets import Data

Progress = Callable[[str], None]


def fit(
    model: nn.Module, optimizer: Optimizer, data: Data, epochs: int, batch_size: int, seed: int, progress: Progress
) -> None:
    """Train what is not frozen; the seed decides on the batches and their augmentation."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    scheduler = CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        adapters.to_training_mode(model)
        for x, y, _ in data.epoch(batch_size, generator):
            optimizer.zero_grad()
            logits = model(moved(x, device))
            F.cross_entropy(logits, y.to(device)).backward()
            optimizer.step()
        scheduler.step()
        progress(f"epoch {epoch + 1}/{epochs}")
