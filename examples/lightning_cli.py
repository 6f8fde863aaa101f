"""LightningCLI: the optimizer and the wrapper are words of the configuration.

python -m examples.lightning_cli fit --config examples/lightning_cli.yaml --data YOUR.DATAMODULE

The module gets two functions, which LightningCLI makes from classes: one builds the optimizer from the parameters, the
other wraps it. ``--model.wrapper dcl_optim.DCLOptimizer``, ``--model.wrapper null`` and ``--model.wrapper.weight 0.3``
choose another one.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer


class Classifier(pl.LightningModule):
    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable,
        wrapper: Callable[[Optimizer, nn.Module], Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.net, self.optimizer, self.wrapper = net, optimizer, wrapper

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.optimizer(self.net.parameters())
        return self.wrapper(optimizer, self.net) if self.wrapper else optimizer


if __name__ == "__main__":
    LightningCLI(Classifier)
