"""Epochs of a model that returns its loss, with checkpoints that continue to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from examples.research.applications.masked_autoencoder.settings import Pretraining
from examples.research.applications.optimizers import penalty
from examples.research.checkpoint import random_state, restore_random_state, save_atomically
from examples.research.datasets import Data
from examples.research.datasets.base import steps_per_epoch

WARMUP = 0.05  # He et al., Tables 8 and 9: of both trainings, 40 of 800 epochs being as large a part as 5 of 100


class Trainer:
    """A model that returns its loss, and what trains it: warm-up and cosine, batches in an order of the seed's.

    Args:
        model: called with what ``feed`` makes of a batch.
        optimizer: with or without DCL.
        epochs: until the learning rate is zero.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Data, batch_size: int, epochs: int, seed: int
    ) -> None:
        self.model, self.optimizer, self.data, self.batch_size = model, optimizer, data, batch_size
        self.device = next(model.parameters()).device
        steps = epochs * steps_per_epoch(data.train_size(), batch_size)
        self.scheduler: LRScheduler = cosine_with_warmup(optimizer, round(WARMUP * steps), steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def train_epoch(self, feed: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> float:
        """Train on every image once; returns the mean loss."""
        self.model.train()
        losses = [self._step(feed(x, y)) for x, y, _ in self.data.epoch(self.batch_size, self.generator)]
        self.losses.append(float(torch.stack(losses).mean()))
        return self.losses[-1]

    def _step(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        output = self.model(**batch)
        loss: Tensor = output.loss
        (loss + penalty(self.optimizer, output.logits)).backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, path: Path, setting: Pretraining) -> None:
        """Write all that a bit-exact continuation needs; the masks are drawn from torch's global generator."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        streams = {"random": random_state(self.device), "loader": self.generator.get_state()}
        save_atomically(state | streams | {"losses": self.losses, "setting": asdict(setting)}, path)

    def resume(self, path: Path, setting: Pretraining) -> None:
        """Take over what :meth:`save` wrote; ValueError where that was for another setting."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["setting"] != asdict(setting):
            raise ValueError(f"{path} was pre-trained with {state['setting']}; choose another folder for checkpoints")
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        restore_random_state(state["random"], self.device)
        self.generator.set_state(state["loader"])
        self.losses = state["losses"]
