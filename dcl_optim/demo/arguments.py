"""The demo's command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import NoReturn

import torch

from dcl_optim import __version__
from dcl_optim.demo.digits import CLASSES, POOL_SIZE

# Chosen with --validation, before any test image was used.
EPOCHS = 100
SEEDS = 10
TRAIN_SIZE = 50
LEARNING_RATE = 0.05
LABEL_SMOOTHING = 0.4
WRONG = {"epochs": 50, "seeds": 5, "train_size": 300}  # with wrong labels, unless they are given
QUICK = {"epochs": 20, "seeds": 3}
OUT = Path("demo-out")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = Parser(
        prog="dcl-demo",
        allow_abbrev=False,
        description="Train a small network on scikit-learn's 8x8 digits with plain SGD, with label smoothing, with "
        "DCP and with DCL, from the same initial weights on the same batches; print a table and draw the curves. "
        "Takes two to four minutes.",
        epilog="Ctrl-C stops early and reports the seeds that were finished.",
    )
    add = parser.add_argument
    add("--epochs", type=int, default=EPOCHS, metavar="N", help="epochs of each run (default: %(default)s)")
    add("--seeds", type=int, default=SEEDS, metavar="N", help="runs of each method (default: %(default)s)")
    train_help = f"training images of each run, {CLASSES} to {POOL_SIZE} (default: %(default)s)"
    add("--train-size", type=int, default=TRAIN_SIZE, metavar="N", help=train_help)
    add("--lr", type=float, default=LEARNING_RATE, help="initial learning rate (default: %(default)s)")
    add("--alpha", type=float, help="share of the past in DCP and DCL, 0 to 1 (default: each optimizer's own)")
    add("--weight", type=float, help="weight of the penalty in DCP and DCL (default: each optimizer's own)")
    wrong_help = (
        f"share of the training labels that are wrong; by default on {WRONG['train_size']} images, {WRONG['epochs']} "
        f"epochs, {WRONG['seeds']} seeds, and with the companion in a row (default: %(default)g)"
    )
    add("--wrong-labels", type=float, default=0.0, metavar="SHARE", help=wrong_help)
    smoothing_help = "of the rival in the table (default: %(default)g)"
    add("--label-smoothing", type=float, default=LABEL_SMOOTHING, metavar="SHARE", help=smoothing_help)
    validation_help = "report on the validation split; this is how the defaults were chosen"
    add("--validation", action="store_true", help=validation_help)
    quick_help = (
        f"{QUICK['seeds']} seeds of {QUICK['epochs']} epochs, some seconds: checks the installation only; --epochs and "
        "--seeds still count"
    )
    add("--quick", action="store_true", help=quick_help)
    add("--device", type=_device, default="cpu", help="cpu, cuda, cuda:1, mps, ... (default: %(default)s)")
    add("--out", type=_path, default=OUT, metavar="FOLDER", help="for the results (default: %(default)s)")
    add("--version", action="version", version=f"dcl-optim {__version__}")
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]  # the advice that follows has addresses
        if reason.startswith("Expected one of"):  # 20 names follow
            reason = "use cpu, cuda, cuda:1 or mps"
        raise argparse.ArgumentTypeError(f"{name!r} is not a device here: {shorten(reason, 120)}") from error
    return name


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; nothing is written.

    Raises:
        SystemExit: a value is out of its range; with code 2 and a message.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.wrong_labels:
        parser.set_defaults(**WRONG)
    if args.quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    checks = (
        ("--epochs", args.epochs, args.epochs >= 1, "at least 1"),
        ("--seeds", args.seeds, args.seeds >= 1, "at least 1"),
        ("--train-size", args.train_size, CLASSES <= args.train_size <= POOL_SIZE, f"{CLASSES} to {POOL_SIZE}"),
        ("--lr", args.lr, 0 < args.lr < math.inf, "a positive number"),
        ("--alpha", args.alpha, args.alpha is None or 0 <= args.alpha <= 1, "0 to 1"),
        ("--weight", args.weight, args.weight is None or 0 <= args.weight < math.inf, "0 or a positive number"),
        ("--wrong-labels", args.wrong_labels, 0 <= args.wrong_labels <= 1, "0 to 1"),
        ("--label-smoothing", args.label_smoothing, 0 <= args.label_smoothing <= 1, "0 to 1"),
    )
    for flag, value, good, allowed in checks:
        if not good:
            parser.error(f"argument {flag}: must be {allowed}, got {value}")
    return args


def make_folder(args: argparse.Namespace) -> None:
    """Make the output folder.

    Raises:
        SystemExit: it cannot be made; with code 2 and a message.
    """
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        make_parser().error(f"argument --out: cannot make the folder {args.out}: {error.strerror}")


def plan(args: argparse.Namespace) -> str:
    """Say what will be trained on which data, about how long it takes, and where the results go."""
    runs = f"{args.seeds} seeds of {args.epochs} epochs"
    share = args.seeds * args.epochs * (50 + args.train_size) / (SEEDS * EPOCHS * (50 + TRAIN_SIZE))
    minutes = f"{round(2 * share)} to {round(4 * share)} minutes" if share > 0.4 else "a minute or less"
    older = " (over older ones)" if (args.out / "results.json").exists() else ""
    wrong = f", {args.wrong_labels:.0%} wrong" if args.wrong_labels else ""
    return (
        f"dcl-demo: trains with and without DCP on {args.train_size} of scikit-learn's 8x8 digits{wrong}\n"
        f"dcl-demo: {runs}, which takes {minutes} on a CPU\n"
        f"dcl-demo: writes results.json and curves.png to {args.out}{older}\n"
    )


def penalty_options(args: argparse.Namespace) -> dict[str, float]:
    """Return what the command line gives of weight and alpha; the optimizers' own defaults hold for the rest."""
    return {name: value for name in ("weight", "alpha") if (value := getattr(args, name)) is not None}
