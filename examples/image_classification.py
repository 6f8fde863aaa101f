"""The paper's recipe on small images, with bfloat16 and checkpoints (scikit-learn's digits: seconds an epoch).

    python -m examples.image_classification --epochs 20
    python -m examples.image_classification --epochs 20 --stop-after 10
    python -m examples.image_classification --epochs 20 --resume
    python -m examples.image_classification --method dcl --amp

SGD at 0.1 with momentum 0.9 and weight decay 5e-4, a cosine schedule, batches of 128, 200 epochs. The second and the
third line are together the first one, on a CPU to the last bit.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchvision.ops import Conv2dNormActivation

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import accuracy


def digits() -> tuple[Dataset, Dataset]:
    """Images of 8x8, a fifth of them for the test."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def network() -> nn.Module:
    first = nn.Sequential(Conv2dNormActivation(1, 32), Conv2dNormActivation(32, 32), nn.MaxPool2d(2))
    second = nn.Sequential(Conv2dNormActivation(32, 64), Conv2dNormActivation(64, 64), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 4, 10))


class Run:
    """A training run: all that its checkpoint holds."""

    def __init__(self, options: argparse.Namespace, train: Dataset) -> None:
        torch.manual_seed(0)
        self.options = options
        self.model = network().to(options.device)
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        if options.method == "dcp":
            optimizer = DCPOptimizer(optimizer, self.model)
        if options.method == "dcl":
            optimizer = DCLOptimizer(optimizer, self.model)
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
        self.loader = DataLoader(train, 128, shuffle=True, drop_last=True)
        self.epoch = 0

    def autocast(self) -> torch.autocast:
        device = torch.device(self.options.device)
        return torch.autocast(device.type, torch.bfloat16, enabled=self.options.amp)

    def train_epoch(self) -> None:
        self.model.train()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with self.autocast():
                loss = F.cross_entropy(self.model(x.to(self.options.device)), y.to(self.options.device))
            loss.backward()
            self.optimizer.step()
        self.scheduler.step()
        self.epoch += 1

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"epoch": self.epoch, "random": torch.get_rng_state()}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)  # a job that is killed while it writes leaves the older checkpoint

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]
        torch.set_rng_state(state["random"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("plain", "dcp", "dcl"), default="dcp")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/images.pt"), help="written after each epoch")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="stop early, to split a run over several jobs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    train, test = digits()
    run = Run(options, train)
    if options.resume:
        run.resume(options.checkpoint)
    while run.epoch < min(options.epochs, options.stop_after or options.epochs):
        run.train_epoch()
        with run.autocast():
            print(f"epoch {run.epoch}: test accuracy {accuracy(run.model, DataLoader(test, 1000)):.2f} %", flush=True)
        run.save(options.checkpoint)  # last: each loader draws a random number, that of the test images too


if __name__ == "__main__":
    main()
