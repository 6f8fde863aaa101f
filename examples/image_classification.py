"""The paper's recipe on small images, with augmentation, bfloat16 and checkpoints (digits: seconds an epoch).

    python -m examples.image_classification --epochs 20
    python -m examples.image_classification --epochs 20 --stop-after 10
    python -m examples.image_classification --epochs 20 --resume
    python -m examples.image_classification --dataset fashion-mnist --method dcl --amp

SGD at 0.1 with momentum 0.9 and weight decay 5e-4, a cosine schedule, batches of 128, 200 epochs. The second and the
third line are together the first one, on a CPU to the last bit. Fashion-MNIST is downloaded by torchvision.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer


def digits() -> tuple[Dataset, Dataset]:
    """scikit-learn's digits of 8x8, the last fifth for the test."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    size = len(data) // 5
    return torch.utils.data.random_split(data, [len(data) - size, size], torch.Generator().manual_seed(0))


def fashion_mnist(folder: Path) -> tuple[Dataset, Dataset]:
    """Zalando's articles of 28x28, shifted and mirrored in training."""
    from torchvision import datasets
    from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

    fixed = [ToTensor(), Normalize(0.286, 0.353)]
    augmented = Compose([RandomCrop(28, padding=4), RandomHorizontalFlip(), *fixed])
    train = datasets.FashionMNIST(folder, train=True, transform=augmented, download=True)
    return train, datasets.FashionMNIST(folder, train=False, transform=Compose(fixed), download=True)


def convolution(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def network() -> nn.Module:
    first = nn.Sequential(convolution(1, 32), convolution(32, 32), nn.MaxPool2d(2))
    second = nn.Sequential(convolution(32, 64), convolution(64, 64), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 4, 10))


class Run:
    """A training run: all that its checkpoint holds."""

    def __init__(self, options: argparse.Namespace, train: Dataset) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.model = network().to(options.device)
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
        if options.method == "dcp":
            optimizer = DCPOptimizer(optimizer, self.model)
        if options.method == "dcl":
            optimizer = DCLOptimizer(optimizer, self.model)
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
        self.loader = DataLoader(train, options.batch_size, shuffle=True, drop_last=True)
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

    @torch.no_grad()
    def accuracy(self, test: Dataset) -> float:
        self.model.eval()
        right = 0
        for x, y in DataLoader(test, 1000):
            with self.autocast():
                z = self.model(x.to(self.options.device))
            right += int((z.argmax(1).cpu() == y).sum())
        return right / len(test)

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
    parser.add_argument("--dataset", choices=("digits", "fashion-mnist"), default="digits")
    parser.add_argument("--data", type=Path, default=Path("runs/data"), help="where torchvision keeps Fashion-MNIST")
    parser.add_argument("--method", choices=("plain", "dcp", "dcl"), default="dcp")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/images.pt"), help="written after each epoch")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="stop early, to split a run over several jobs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    train, test = digits() if options.dataset == "digits" else fashion_mnist(options.data)
    run = Run(options, train)
    if options.resume:
        run.resume(options.checkpoint)
    while run.epoch < min(options.epochs, options.stop_after or options.epochs):
        run.train_epoch()
        print(f"epoch {run.epoch}: test accuracy {run.accuracy(test):.4f}", flush=True)
        run.save(options.checkpoint)  # last: each loader draws a random number, that of the test images too


if __name__ == "__main__":
    main()
