"""A demo on scikit-learn's digits: the same network trained by plain SGD, with DCL and with DCP."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcl_optim import DCLOptimizer, DCPOptimizer, __version__
from dcl_optim.metrics import top_non_target_consistency
from dcl_optim.plots import training_curves
from dcl_optim.presets import PRESETS
from dcl_optim.report import format_table, summarise, verdict

METHODS = ("plain", "DCL", "DCP")
CLASSES, BATCH_SIZE = 10, 64
# Chosen with --validation, before the test images were looked at.
EPOCHS, SEEDS, TRAIN_SIZE, LEARNING_RATE = 40, 10, 200, 0.05
TEST_SIZE, VALIDATION_SIZE, POOL_SIZE = 597, 400, 800

History = dict[str, Any]
Images = tuple[Tensor, Tensor]


# ---- data and model --------------------------------------------------------------------------------------------------


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """Shuffle samples so that every prefix has the classes in the whole's proportions, as far as it can."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    places = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        members = shuffled[labels[shuffled] == label]
        places[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    return shuffled[places[shuffled].argsort(stable=True)]


def load_digits() -> tuple[Images, Images, Images]:
    """Load the 1797 digits as (N, 1, 8, 8), split into training pool, validation and test, always the same way."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.3
    labels = torch.tensor(digits.target, dtype=torch.long)
    test, validation, pool = stratified_order(labels, seed=0).split([TEST_SIZE, VALIDATION_SIZE, POOL_SIZE])
    return (images[pool], labels[pool]), (images[validation], labels[validation]), (images[test], labels[test])


def make_model() -> nn.Module:
    """Build a network of four convolutions for images of shape (1, 8, 8)."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((1, 16, 16, 32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 32, CLASSES))


# ---- training --------------------------------------------------------------------------------------------------------


class Run:
    """One method's training from one seed, an epoch at a time."""

    def __init__(self, method: str, seed: int, train: Images, evaluation: Images, args: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.model, self.criterion, self.seed = make_model(), nn.CrossEntropyLoss(), seed
        self.optimizer = self._wrap(method, args)
        self.scheduler = CosineAnnealingLR(self.optimizer, args.epochs)
        self.train, self.evaluation = train, evaluation
        self.history: History = {"seed": seed, "accuracy": [], "consistency": [], "seconds": []}

    def _wrap(self, method: str, args: argparse.Namespace) -> Optimizer:
        base = SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
        if method == "plain":
            return base
        options = {"preset": args.preset, "weight": args.weight, "alpha": args.alpha, "criterion": self.criterion}
        if method == "DCL":
            return DCLOptimizer(base, self.model, **options)
        return DCPOptimizer(base, self.model, CLASSES, **options)

    def epoch(self) -> None:
        """Train one epoch and take its measures."""
        images, labels = self.train
        # Every method of a seed draws the same batches, whatever the others drew before it.
        epoch = len(self.history["seconds"])
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        order = torch.randperm(len(labels), generator=generator)
        start = time.perf_counter()
        for batch in order.split(BATCH_SIZE):
            self.optimizer.zero_grad()
            self.criterion(self.model(images[batch]), labels[batch]).backward()
            self.optimizer.step()
        self.history["seconds"].append(time.perf_counter() - start)
        self.scheduler.step()
        self._measure()

    def _measure(self) -> None:
        self.model.eval()
        with torch.no_grad():
            images, labels = self.evaluation
            self.history["accuracy"].append((self.model(images).argmax(1) == labels).float().mean().item())
            images, labels = self.train
            self.history["consistency"].append(top_non_target_consistency(self.model(images), labels).nanmean().item())
        self.model.train()

    def finish(self) -> History:
        """Give the history, with what the method keeps beside the model and its plain optimizer."""
        optimizer = self.optimizer
        companion = optimizer.companion.parameters() if isinstance(optimizer, DCLOptimizer) else ()
        self.history["parameters_added"] = sum(parameter.numel() for parameter in companion)
        base = optimizer.base if isinstance(optimizer, (DCLOptimizer, DCPOptimizer)) else optimizer
        self.history["bytes_added"] = _bytes(optimizer.state_dict()) - _bytes(base.state_dict())
        return self.history


def _bytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(_bytes, tree.values()))
    return sum(map(_bytes, tree)) if isinstance(tree, (list, tuple)) else 0


def train_seed(seed: int, args: argparse.Namespace, bar: Any) -> dict[str, History]:
    """Train all methods from one seed, taking turns after every epoch so that a busy machine slows all of them."""
    pool, validation, test = load_digits()
    chosen = stratified_order(pool[1], seed)[: args.train_size]
    evaluation = validation if args.validation else test
    runs = {method: Run(method, seed, (pool[0][chosen], pool[1][chosen]), evaluation, args) for method in METHODS}
    for _ in range(args.epochs):
        for run in runs.values():
            run.epoch()
        bar.set_postfix({"seed": seed} | {m: f"{100 * run.history['accuracy'][-1]:.1f}%" for m, run in runs.items()})
        bar.update()
    return {method: run.finish() for method, run in runs.items()}


def train_all(args: argparse.Namespace) -> tuple[dict[str, list[History]], bool]:
    """Train every seed; on Ctrl-C give the seeds that were finished, and True."""
    from tqdm import tqdm

    histories: dict[str, list[History]] = {method: [] for method in METHODS}
    with tqdm(total=args.seeds * args.epochs, unit="epoch", disable=None, leave=False, dynamic_ncols=True) as bar:
        try:
            for seed in range(args.seeds):
                finished = train_seed(seed, args, bar)
                # One assignment: Ctrl-C cannot come between one method's run and the next one's.
                histories = {method: [*histories[method], finished[method]] for method in METHODS}
                save_results(args, histories)
        except KeyboardInterrupt:
            return histories, True
    return histories, False


# ---- reporting -------------------------------------------------------------------------------------------------------


def save_results(args: argparse.Namespace, histories: dict[str, list[History]], interrupted: bool = False) -> None:
    """Write results.json; whoever reads it, even after a crash, finds a whole file."""
    results = {
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "interrupted": interrupted,
        "versions": {"dcl_optim": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "table": [asdict(row) for row in summarise(histories)],
        "histories": histories,
    }
    partial = args.out / "results.json.part"
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, args.out / "results.json")


def report(args: argparse.Namespace, histories: dict[str, list[History]], interrupted: bool) -> None:
    """Print the table and the verdicts, draw the plot, write the results."""
    save_results(args, histories, interrupted)
    rows, split = summarise(histories), "validation" if args.validation else "test"
    images = VALIDATION_SIZE if args.validation else TEST_SIZE
    given = {"weight": args.weight, "alpha": args.alpha}
    settings = ", ".join([f"preset {args.preset}", *(f"{name} {v:g}" for name, v in given.items() if v is not None)])
    print(
        f"digits: {args.train_size} training and {images} {split} images, {args.epochs} epochs, "
        f"{len(histories['plain'])} seeds; {settings}\n"
    )
    print(format_table(rows, split), "\n")
    for row in rows[1:]:
        print(verdict(row))
    curves = training_curves(histories, title=f"digits, {args.train_size} training images", split=split)
    curves.savefig(args.out / "curves.png")
    print(f"\nWrote {args.out / 'results.json'} and {args.out / 'curves.png'}.")


# ---- command line ----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="dcl-demo",
        description="Train a small network on scikit-learn's 8x8 digits with plain SGD, with DCL and with DCP, from "
        "the same initial weights on the same batches; print a table and draw the curves. Takes a minute or two.",
        epilog="Ctrl-C stops early and reports the seeds that were finished.",
    )
    add = parser.add_argument
    add("--epochs", type=int, default=EPOCHS, metavar="N", help="epochs of each run (default: %(default)s)")
    add("--seeds", type=int, default=SEEDS, metavar="N", help="runs of each method (default: %(default)s)")
    train_help = f"training images of each run, {CLASSES} to {POOL_SIZE} (default: %(default)s)"
    add("--train-size", type=int, default=TRAIN_SIZE, metavar="N", help=train_help)
    add("--lr", type=float, default=LEARNING_RATE, help="learning rate at the start (default: %(default)s)")
    add("--preset", choices=PRESETS, default="default", help="settings of DCL and DCP (default: %(default)s)")
    add("--alpha", type=float, help="share of the past in DCL and DCP, 0 to 1 (default: the preset's)")
    add("--weight", type=float, help="weight of the penalty in DCL and DCP (default: the preset's)")
    validation_help = "report on the validation split; this is how the defaults were chosen"
    add("--validation", action="store_true", help=validation_help)
    add("--out", type=Path, default=Path("demo-out"), metavar="FOLDER", help="for the results (default: %(default)s)")
    add("--version", action="version", version=f"dcl-optim {__version__}")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; leave with code 2 and a message on values that make no sense."""
    parser = make_parser()
    args = parser.parse_args(argv)
    checks = (
        ("--epochs", args.epochs, args.epochs >= 1, "at least 1"),
        ("--seeds", args.seeds, args.seeds >= 1, "at least 1"),
        ("--train-size", args.train_size, CLASSES <= args.train_size <= POOL_SIZE, f"{CLASSES} to {POOL_SIZE}"),
        ("--lr", args.lr, 0 < args.lr < math.inf, "a positive number"),
        ("--alpha", args.alpha, args.alpha is None or 0 <= args.alpha <= 1, "0 to 1"),
        ("--weight", args.weight, args.weight is None or 0 <= args.weight < math.inf, "0 or a positive number"),
    )
    for flag, value, good, allowed in checks:
        if not good:
            parser.error(f"argument {flag}: must be {allowed}, got {value}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot make the folder {args.out}: {error.strerror}")
    return args


def require_extra() -> None:
    """Leave with a hint before the training, not after it, if a package of the demo is missing."""
    try:
        for name in ("sklearn.datasets", "tqdm", "matplotlib.figure"):
            importlib.import_module(name)
    except ImportError as error:
        sys.exit(f'dcl-demo: {error}; the demo needs: pip install "dcl-optim[demo]"')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; give the exit code, 130 after Ctrl-C."""
    args = parse(argv)
    require_extra()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors as small as these lose more to the threads' meeting than they gain
    try:
        histories, interrupted = train_all(args)
        if histories["plain"]:
            report(args, histories, interrupted)
        if interrupted:
            print(f"Interrupted: {len(histories['plain'])} of {args.seeds} seeds were finished.", file=sys.stderr)
    finally:
        torch.set_num_threads(threads)
    return 130 if interrupted else 0
