"""A LightningModule with the term, class weights, logging and resumption, on scikit-learn's digits.

    python -m examples.lightning_module --epochs 20
    python -m examples.lightning_module --epochs 20 --stop-after 10
    python -m examples.lightning_module --epochs 20 --resume runs/lightning/last.ckpt

It takes about ten seconds. The last two are together the first, to the last bit. Wrap the object that training_step
calls: `self.net` here; where it calls `self(x)`, `self` works as well as the network inside. The prototypes are in the
Trainer's checkpoints; the figures of each epoch are in `runs/lightning-logs`. With a plain cross-entropy the term can
be left out: only configure_optimizers differs then. DCL is `DCLOptimizer` and `penalty(z)`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dcl_optim import DCPOptimizer


class Digits(pl.LightningModule):
    """A classifier with class weights, which the line could not read: so its loss has the term."""

    def __init__(self, epochs: int, class_weights: Tensor) -> None:
        super().__init__()
        self.epochs = epochs
        self.net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
        self.criterion = nn.CrossEntropyLoss(class_weights)

    def loss_of(self, batch: list[Tensor], part: str) -> Tensor:
        x, y = batch
        z = self.net(x)
        loss = self.criterion(z, y)
        figures = {f"{part}/accuracy": (z.argmax(1) == y).float().mean(), f"{part}/loss": loss.detach()}
        self.log_dict(figures, on_step=False, on_epoch=True)
        if self.training:  # trainer.test has no optimizer
            loss = loss + self.optimizers().penalty(z, y)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss_of(batch, "train")

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.optimizers().logs("dcl/"))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss_of(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        optimizer = DCPOptimizer(optimizer, self.net)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """A training and a test set."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.astype("float32") / 16, labels, test_size=360, random_state=0)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, parts)
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def training_loader(data: TensorDataset) -> DataLoader:
    """The order follows from the epoch, which the Trainer tells the sampler: a resumed run meets the same batches."""
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    return DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=20)
    add("--folder", type=Path, default=Path("runs/lightning"), help="of last.ckpt, written after each epoch")
    add("--resume", type=Path, metavar="PATH", help="continue from a checkpoint")
    add("--stop-after", type=int, metavar="EPOCHS", help="stop early, to split a run over several jobs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> float:
    options = parse(arguments)
    pl.seed_everything(0, verbose=False)
    train, test = digits()
    labels = train.tensors[1]
    class_weights = len(labels) / (10 * labels.bincount())  # the rarer, the more
    module = Digits(options.epochs, class_weights)
    trainer = pl.Trainer(
        max_epochs=min(options.epochs, options.stop_after or options.epochs),
        callbacks=ModelCheckpoint(options.folder, filename="last", enable_version_counter=False),
        logger=CSVLogger(f"{options.folder}-logs", name=""),
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, training_loader(train), ckpt_path=options.resume, weights_only=True)
    accuracy = trainer.test(module, DataLoader(test, batch_size=360), verbose=False)[0]["test/accuracy"]
    print(f"test accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
