"""What the demo leaves: results.json, curves.png and a CSV file, the table and verdicts on the terminal."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcl_optim import __version__
from dcl_optim.demo.arguments import make_parser, penalty_options
from dcl_optim.demo.digits import TEST_SIZE, VALIDATION_SIZE
from dcl_optim.demo.report import format_table, summarise, verdict
from dcl_optim.demo.training import Histories
from dcl_optim.plots import training_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(args: argparse.Namespace, histories: Histories, interrupted: bool) -> None:
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
    partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, args.out / "results.json")


def load(args: argparse.Namespace) -> tuple[argparse.Namespace, Histories]:
    """Read a run from the results.json of ``--from``; what it leaves goes where the command line says.

    Raises:
        SystemExit: the file cannot be read or shown, with code 2 and a message.
    """
    try:
        results = json.loads(args.saved.read_text(encoding="utf-8"))
        now = {name: getattr(args, name) for name in ("saved", "out", "csv")}
        run, histories = argparse.Namespace(**results["arguments"] | now), results["histories"]
        _render(run, histories), _csv_rows(histories)
    except OSError as error:
        make_parser().error(f"argument --from: cannot read {args.saved}: {error.strerror}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        make_parser().error(f"argument --from: {args.saved} is no results.json of this demo: {reason}")
    return run, histories


def present(args: argparse.Namespace, histories: Histories) -> int:
    """Draw the curves, write the CSV file, print the table and the verdicts; return the exit code."""
    text, curves = _render(args, histories)
    files = [args.out / "results.json"] if args.saved is None else []
    files.append(args.out / "curves.png")
    curves.savefig(files[-1])
    if args.csv is not None:
        files.append(args.csv)
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(_csv_rows(histories))
    try:  # after the files: a reader such as head may leave
        print(f"{text}\n\nWrote {' and '.join(map(str, files))}.", flush=True)
    except BrokenPipeError:
        # Python flushes once more at its exit. The code is the shell's for a program that a closed pipe ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _render(args: argparse.Namespace, histories: Histories) -> tuple[str, Figure]:
    rows, split = summarise(histories), "validation" if args.validation else "test"
    images, seeds = VALIDATION_SIZE if args.validation else TEST_SIZE, len(histories["plain"])
    given = ", ".join(f"{name} {value:g}" for name, value in penalty_options(args).items())
    lines = [
        f"digits: {args.train_size} training and {images} {split} images, {args.epochs} epochs, {seeds} seeds",
        f"{given or 'default weight and alpha'}\n",
        f"{format_table(rows, split)}\n",
        *(verdict(row, seeds) for row in rows if row.method != "plain" or row.diverged),
    ]
    drawn = {
        method: [run | {"consistency": [math.nan if c is None else c for c in run["consistency"]]} for run in runs]
        for method, runs in histories.items()
    }
    return "\n".join(lines), training_curves(drawn, title=f"digits, {args.train_size} training images", split=split)


def _csv_rows(histories: Histories) -> list[list[Any]]:
    head = ["method", "seed", "accuracy", "diverged"]
    return [head] + [
        [method, run["seed"], run["accuracy"][-1], run["diverged"]]
        for method, runs in histories.items()
        for run in runs
    ]
