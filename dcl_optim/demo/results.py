"""What the demo leaves: results.json, curves.png and a CSV file, the table and verdicts on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcl_optim import __version__
from dcl_optim.demo.arguments import make_parser, penalty_options
from dcl_optim.demo.digits import TEST_SIZE, VALIDATION_SIZE
from dcl_optim.demo.report import format_table, summarise, verdict
from dcl_optim.demo.training import METHODS, Histories
from dcl_optim.plots import training_curves

EXPECT = "Ten classes gain least, few images a class or wrong labels most: docs/results.md"

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(args: argparse.Namespace, histories: Histories, interrupted: bool) -> None:
    """Write results.json; whoever reads it, even after a crash, finds a whole file."""
    results = {
        "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
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
        run, found = argparse.Namespace(**results["arguments"] | now), results["histories"]
        histories = {method: found[method] for method in sorted(found, key=METHODS.index)}
        _headline(run, 1), _render(run, histories), _csv_rows(histories)
    except OSError as error:
        make_parser().error(f"argument --from: cannot read {args.saved}: {error.strerror}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        make_parser().error(f"argument --from: {args.saved} is no results.json of this demo: {reason}")
    return run, histories


def announce(args: argparse.Namespace, seeds: int) -> None:
    """Print what is trained, before the training."""
    with contextlib.suppress(BrokenPipeError):  # present() meets it again, when the files are written
        print(_headline(args, seeds), flush=True)


def _headline(args: argparse.Namespace, seeds: int) -> str:
    split, images = ("validation", VALIDATION_SIZE) if args.validation else ("test", TEST_SIZE)
    given = ", ".join(f"{name} {value:g}" for name, value in penalty_options(args).items())
    return (
        f"digits: {args.train_size} training and {images} {split} images, {args.epochs} epochs, {seeds} seeds\n"
        f"{given or 'default weight and alpha'}\n"
    )


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
    seeds, quick = len(histories["plain"]), getattr(args, "quick", False)
    planned = getattr(args, "seeds", seeds)
    lines = [f"{format_table(rows, split)}\n"]
    lines += [f"{seeds} of {planned} seeds were finished.\n"] * (seeds < planned)
    lines += [verdict(row, seeds) for row in rows if row.diverged or (row.method != "plain" and not quick)]
    lines += ["--quick checks the installation only: so few steps and seeds compare nothing."] * quick
    lines.append(EXPECT)
    title = f"digits, {args.train_size} training images"
    return "\n".join(lines), training_curves(histories, title=title, split=split)


def _csv_rows(histories: Histories) -> list[list[Any]]:
    head = ["method", "seed", "accuracy", "diverged"]
    return [head] + [
        [method, run["seed"], run["accuracy"][-1], run["diverged"]]
        for method, runs in histories.items()
        for run in runs
    ]
