"""The paper's recipe on small images, with checkpoints, mixed precision and TensorBoard.

    python -m examples.image_classification --dataset digits --epochs 20
    python -m examples.image_classification --dataset fashion-mnist --model resnet18 --method dcl --amp

SGD at 0.1 with momentum 0.9 and weight decay 5e-4, a cosine schedule, batches of 128, 200 epochs. The paper's λ and α
are ``--weight 1 --alpha 0.6``; without them the wrapper's own defaults hold. Progress goes to the standard error; the
standard output is one line of JSON with the test accuracy after the last epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.helpers import data, models
from examples.helpers.arguments import Parser, add_device, number
from examples.helpers.checkpoint import random_state, restore_random_state, save_atomically
from examples.helpers.extras import explain
from examples.helpers.optimizers import METHODS, build_optimizer

# What a resumed run may change; anything else would make another run of it.
FREE = ("data", "download", "device", "checkpoint", "resume", "stop_after", "tensorboard")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dataset", choices=("digits", "fashion-mnist"), default="digits")
    add("--data", type=Path, help=f"folder of Fashion-MNIST's four .gz files (default {data.DEBIAN})")
    add("--download", action="store_true", help="let torchvision download Fashion-MNIST to --data (or runs/data)")
    add("--train-size", type=number(int, 2), help="train on so many images only")
    add("--model", choices=models.NAMES, default="cnn")
    add("--method", choices=METHODS, default="dcp")
    add("--weight", type=number(float, 0), help="λ of dcl and dcp (default: the wrapper's own)")
    add("--alpha", type=number(float, 0, 1), help="α of dcl and dcp (default: the wrapper's own)")
    add("--epochs", type=number(int, 1), default=200)
    add("--batch-size", type=number(int, 2), default=128)
    add("--lr", type=number(float, 0), default=0.1)
    add("--seed", type=number(int, 0), default=0)
    add_device(parser)
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--checkpoint", type=Path, help="file written after each epoch (default: one in runs/ named for the run)")
    add("--resume", type=Path, metavar="PATH", help="continue from a checkpoint, to the last bit on a CPU")
    add("--stop-after", type=number(int, 1), metavar="EPOCHS", help="stop early, to split a run over several jobs")
    add("--tensorboard", type=Path, metavar="DIR", help="write loss and accuracy for TensorBoard")
    return parser


class Run:
    """A training run: everything that its checkpoint has to hold."""

    def __init__(self, options: argparse.Namespace, images: data.Images) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.images = images
        self.device = torch.device(options.device)
        self.model = models.build(options.model, data.CLASSES).to(self.device)
        self.criterion = nn.CrossEntropyLoss()
        base = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
        # The one line that is new; for "dcp" it is DCPOptimizer(base, self.model).
        self.optimizer = build_optimizer(options.method, base, self.model, weight=options.weight, alpha=options.alpha)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.epochs)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.loader = data.training_loader(images, options.batch_size, self.generator)
        self.epoch = 0

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.amp)

    def train_epoch(self) -> float:
        """Train on every batch once; returns the mean task loss."""
        self.model.train()
        total, count = torch.zeros((), device=self.device), 0
        title = f"epoch {self.epoch + 1}/{self.options.epochs}"
        for x, y in tqdm(self.loader, desc=title, leave=False, disable=None):  # None: no bar in a log file
            if self.images.augmented:
                x = data.crop_and_flip(x, self.generator)
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            with self.autocast():
                loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total, count = total + loss.detach() * len(y), count + len(y)
        self.scheduler.step()
        self.epoch += 1
        return float(total / count)

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of the test set that the model gets right."""
        self.model.eval()
        right = 0
        for x, y in zip(self.images.x_test.split(1000), self.images.y_test.split(1000), strict=True):
            with self.autocast():
                z: Tensor = self.model(x.to(self.device))
            right += int((z.argmax(1).cpu() == y).sum())
        return right / len(self.images.y_test)

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.options).items() if name not in FREE}

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "random": random_state(self.device),
            "loader": self.generator.get_state(),
            "arguments": self.arguments(),
        }
        save_atomically(state, path)

    def resume(self, path: Path) -> None:
        """Take over a checkpoint.

        Raises:
            ValueError: it is no checkpoint, or one of a run with other arguments.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            ours, theirs = self.arguments(), state["arguments"]
        except OSError:
            raise
        except Exception as error:  # a damaged pickle leads torch.load into any error
            raise ValueError(f"{path} is no checkpoint of this script") from error
        changed = [f"{name}={theirs.get(name)}" for name in ours if ours[name] != theirs.get(name)]
        if changed:
            raise ValueError(f"{path} is of a run with {', '.join(changed)}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        restore_random_state(state["random"], self.device)
        self.generator.set_state(state["loader"])
        self.epoch = state["epoch"]


def open_writer(folder: Path | None) -> Any:
    """TensorBoard's writer, or None if none is wanted.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs TensorBoard: pip install tensorboard") from error
    return SummaryWriter(str(folder))


def train(run: Run, path: Path, writer: Any) -> dict[str, Any]:
    """Train to the end, or to where this job stops; returns the figures after the last epoch."""
    options = run.options
    figures: dict[str, float] = {}
    while run.epoch < min(options.epochs, options.stop_after or options.epochs):
        rate = run.optimizer.param_groups[0]["lr"]
        figures = {"loss": run.train_epoch(), "accuracy": run.accuracy(), "lr": rate}
        run.save(path)
        line = f"epoch {run.epoch}: loss {figures['loss']:.4f}, test accuracy {figures['accuracy']:.4f}"
        tqdm.write(line, file=sys.stderr)
        for name, value in figures.items() if writer else ():
            writer.add_scalar(name, value, run.epoch)
    return {
        **{name: getattr(options, name) for name in ("dataset", "model", "method", "seed")},
        "epoch": run.epoch,
        "test_accuracy": figures["accuracy"] if figures else run.accuracy(),
        "checkpoint": str(path),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.dataset == "digits" and (options.data or options.download):
        parser.error("--data and --download are for --dataset fashion-mnist; the digits come with scikit-learn")
    torch.backends.cudnn.deterministic = True
    try:
        writer = open_writer(options.tensorboard)
        images = data.digits() if options.dataset == "digits" else data.fashion_mnist(options.data, options.download)
        run = Run(options, images.head(options.train_size) if options.train_size else images)
        if options.resume:
            run.resume(options.resume)
    except (data.DataError, ImportError, OSError, ValueError) as error:
        parser.error(explain(error) or str(error))
    default = Path("runs") / f"{options.dataset}-{options.model}-{options.method}-seed{options.seed}.pt"
    result = train(run, options.checkpoint or options.resume or default, writer)
    if writer:
        writer.close()
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
