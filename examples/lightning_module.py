"""A LightningModule in which only configure_optimizers differs, on scikit-learn's digits (about ten seconds).

    python -m examples.lightning_module --method dcp --epochs 20
    python -m examples.lightning_module --method dcp --epochs 20 --stop-after 10
    python -m examples.lightning_module --method dcp --epochs 20 --resume runs/lightning/last.ckpt

The last two are together the first, to the last bit. Wrap the object that training_step calls: `self.net` here; where
it calls `self(x)`, `self` works as well as the network inside. The companion is in the Trainer's checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

from dcl_optim import DCLOptimizer, DCPOptimizer


class Digits(pl.LightningModule):
    def __init__(self, method: str, epochs: int) -> None:
        super().__init__()
        self.method, self.epochs = method, epochs
        self.net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.criterion(self.net(x), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        z = self.net(x)
        self.log_dict({"accuracy": (z.argmax(1) == y).float().mean(), "loss": F.cross_entropy(z, y)})

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if self.method == "dcp":
            optimizer = DCPOptimizer(optimizer, self.net)
        if self.method == "dcl":
            optimizer = DCLOptimizer(optimizer, self.net)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def digits() -> list[Dataset]:
    """A training and a test set."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    return random_split(data, [1437, 360], torch.Generator().manual_seed(0))


def training_loader(data: Dataset) -> DataLoader:
    """The order follows from the epoch, which the Trainer tells the sampler: a resumed run meets the same batches."""
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    return DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", choices=("plain", "dcp", "dcl"), default="dcp")
    add("--epochs", type=int, default=20)
    add("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    add("--folder", type=Path, default=Path("runs/lightning"), help="of last.ckpt, written after each epoch")
    add("--resume", type=Path, metavar="PATH", help="continue from a checkpoint")
    add("--stop-after", type=int, metavar="EPOCHS", help="stop early, to split a run over several jobs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> float:
    options = parse(arguments)
    pl.seed_everything(0, verbose=False)
    train, test = digits()
    module = Digits(options.method, options.epochs)
    trainer = pl.Trainer(
        max_epochs=min(options.epochs, options.stop_after or options.epochs),
        precision=options.precision,
        callbacks=ModelCheckpoint(options.folder, filename="last", enable_version_counter=False),
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, training_loader(train), ckpt_path=options.resume, weights_only=True)
    accuracy = trainer.test(module, DataLoader(test, batch_size=360), verbose=False)[0]["accuracy"]
    print(f"test accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
