"""Classify scikit-learn's digits (seconds an epoch) or images of your own, with bfloat16 and checkpoints.

    python -m examples.image_classification --epochs 20
    python -m examples.image_classification --epochs 20 --stop-after 10
    python -m examples.image_classification --epochs 20 --resume
    python -m examples.image_classification --paper --method dcl --images DIR  # DIR/train/CLASS/*, DIR/test/CLASS/*

SGD at 0.1 with momentum 0.9 and weight decay 5e-4, a cosine schedule, batches of 128, 200 epochs. The second and the
third line are together the first one, on a CPU to the last bit. ``--paper`` has the rest of the paper's recipe for
small images: its settings, crop, mirror and normalization. Your own network goes into ``network``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, random_split
from torchvision.datasets import ImageFolder
from torchvision.ops import Conv2dNormActivation
from torchvision.transforms import v2

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import accuracy

DCL: dict[str, Any] = {"weight": 1.0, "alpha": 0.6, "distance": "squared"}
PAPER = {"plain": {}, "dcl": DCL, "dcp": DCL | {"update": "batch"}}


def digits() -> tuple[Dataset, Dataset]:
    """Images of 8x8, a fifth of them for the test."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def folders(path: Path, side: int = 32) -> tuple[ImageFolder, ImageFolder]:
    """Images of any size in a folder for each class, scaled to squares."""
    scaled = v2.Compose([v2.PILToTensor(), v2.Resize((side, side)), v2.ToDtype(torch.float32, scale=True)])
    return ImageFolder(str(path / "train"), scaled), ImageFolder(str(path / "test"), scaled)


def crops_and_mirrors(samples: list[Any]) -> Any:
    """A batch of crops from images with a black border, half of them mirrored."""
    x, y = default_collate(samples)
    crop, mirror = v2.RandomCrop(x.shape[-2:], padding=x.shape[-1] // 8), v2.RandomHorizontalFlip()
    return torch.stack([mirror(crop(image)) for image in x]), y


def normalization(train: Any) -> nn.Module:
    some = torch.stack([train[number][0] for number in range(0, len(train), 1 + len(train) // 1000)])
    return v2.Normalize(some.mean((0, 2, 3)).tolist(), some.std((0, 2, 3)).tolist())


def network(channels: int, classes: int) -> nn.Module:
    first = nn.Sequential(Conv2dNormActivation(channels, 32), Conv2dNormActivation(32, 32), nn.MaxPool2d(2))
    second = nn.Sequential(Conv2dNormActivation(32, 64), Conv2dNormActivation(64, 64), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 4, classes))


class Run:
    """A training run: all that its checkpoint holds."""

    def __init__(self, options: argparse.Namespace, train: Dataset, classes: int = 10) -> None:
        torch.manual_seed(0)
        self.options = options
        self.model = network(len(train[0][0]), classes).to(options.device)
        if options.paper:
            self.model = nn.Sequential(normalization(train), self.model)
        settings = PAPER[options.method] if options.paper else {}
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        if options.method == "dcp":
            optimizer = DCPOptimizer(optimizer, self.model, **settings)
        if options.method == "dcl":
            optimizer = DCLOptimizer(optimizer, self.model, **settings)
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
        draw = crops_and_mirrors if options.paper else None
        self.loader = DataLoader(train, min(128, len(train)), shuffle=True, drop_last=True, collate_fn=draw)
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
    parser.add_argument("--paper", action="store_true", help="the paper's settings, crop and mirror")
    parser.add_argument("--images", type=Path, metavar="DIR", help="with train/CLASS and test/CLASS (default: digits)")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/images.pt"), help="written after each epoch")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="stop early, to split a run over several jobs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    train, test = folders(options.images) if options.images else digits()
    run = Run(options, train, len(train.classes) if options.images else 10)
    if options.resume:
        run.resume(options.checkpoint)
    while run.epoch < min(options.epochs, options.stop_after or options.epochs):
        run.train_epoch()
        with run.autocast():
            print(f"epoch {run.epoch}: test accuracy {accuracy(run.model, DataLoader(test, 1000)):.2f} %", flush=True)
        run.save(options.checkpoint)  # last: each loader draws a random number, that of the test images too


if __name__ == "__main__":
    main()
