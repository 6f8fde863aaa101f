"""Run in two processes by test_lightning_distributed.py: python -m tests.integrations.lightning_processes FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcl_optim import DCLOptimizer
from tests.helpers import mlp
from tests.integrations.lightning_modules import Classifier, loader, quiet_trainer


class Halves(Classifier):
    """Each process takes its half of the batch, and writes down what it ended with."""

    def __init__(self, wrapped: str, folder: Path) -> None:
        super().__init__("dcl", mlp())
        self.wrapped, self.folder = wrapped, folder

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part[self.global_rank :: 2] for part in batch)
        return self.criterion(self(x), y)

    def configure_optimizers(self) -> DCLOptimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return DCLOptimizer(optimizer, self if self.wrapped == "self" else self.net, weight=1.0)

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        state = {"net": self.net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, self.folder / f"{self.wrapped}-{self.global_rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("net", "self"):
        trainer = quiet_trainer(strategy="ddp", devices=2, use_distributed_sampler=False)
        trainer.fit(Halves(name, Path(sys.argv[1])), loader())
    torch.distributed.barrier()
    os._exit(0)  # the group's threads can abort the interpreter's exit, see tests/helpers.py
