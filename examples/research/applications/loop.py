"""The plain loop, the same with and without DCL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from examples.research.applications import adapters
from examples.research.applications.classification import moved
from examples.research.datasets import Data

Progress = Callable[[str], None]


def train_epochs(
    model: nn.Module,
    optimizer: Optimizer,
    epochs: int,
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Train what is not frozen, the learning rate falling to 0 along a cosine; gives each epoch's number and last loss.

    Args:
        model: what is put into training mode.
        optimizer: of its weights.
        epochs: how many.
        batches: begins a pass over inputs and labels.
        loss: of one of them.
    """
    scheduler = CosineAnnealingLR(optimizer, epochs)
    for epoch in range(1, epochs + 1):
        adapters.to_training_mode(model)
        for x, y in batches():
            optimizer.zero_grad()
            last = loss(x, y)
            last.backward()
            optimizer.step()
        scheduler.step()
        yield epoch, last


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    epochs: int,
    batch_size: int,
    seed: int,
    progress: Progress,
    smoothing: float = 0.0,
) -> None:
    """Train on labelled images; the seed decides on the batches and their augmentation."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        return ((moved(x, device), y.to(device)) for x, y, _ in data.epoch(batch_size, generator))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=smoothing)

    for epoch, _ in train_epochs(model, optimizer, epochs, batches, loss):
        progress(f"epoch {epoch}/{epochs}")
