"""What the demo leaves: results.json and curves.png, the table and verdicts on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from dcl_optim import __version__
from dcl_optim.demo.arguments import penalty_options
from dcl_optim.demo.digits import TEST_SIZE, VALIDATION_SIZE
from dcl_optim.demo.report import format_table, summarise, verdict
from dcl_optim.demo.training import Histories
from dcl_optim.plots import training_curves

READ_ON = "Other data, other methods: docs/results.md; wrong labels: docs/noisy-labels.md"


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


def announce(args: argparse.Namespace) -> None:
    """Print what is trained, before the training."""
    split = "validation" if args.validation else "test"
    images = VALIDATION_SIZE if args.validation else TEST_SIZE
    given = ", ".join(f"{name} {value:g}" for name, value in penalty_options(args).items())
    given = given or "default weight and alpha"
    given += f"; label smoothing {args.label_smoothing:g}"
    wrong = f", {args.wrong_labels:.0%} of the labels wrong" if args.wrong_labels else ""
    trained = (
        f"digits: {args.train_size} training and {images} {split} images, {args.epochs} epochs, {args.seeds} seeds"
    )
    headline = f"{trained}{wrong}\n{given}\n"
    with contextlib.suppress(BrokenPipeError):  # present() meets it again, when the files are written
        print(headline, flush=True)


def present(args: argparse.Namespace, histories: Histories) -> int:
    """Draw the curves, print the table and the verdicts; return the exit code."""
    split = "validation" if args.validation else "test"
    wrong = f", {args.wrong_labels:.0%} wrong labels" if args.wrong_labels else ""
    title = f"digits, {args.train_size} training images{wrong}"
    curves = args.out / "curves.png"
    training_curves(histories, title=title, split=split).savefig(curves)
    text = _text(args, histories)
    try:  # after the files: a reader such as head may leave
        print(f"{text}\n\nWrote {args.out / 'results.json'} and {curves}.", flush=True)
    except BrokenPipeError:
        # Python flushes once more at its exit. The code is the shell's for a program that a closed pipe ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _text(args: argparse.Namespace, histories: Histories) -> str:
    """Format the table, the verdicts and the hints."""
    rows = summarise(histories)
    seeds = len(histories["plain"])
    lines = [f"{format_table(rows)}\n"]
    if seeds < args.seeds:
        lines.append(f"{seeds} of {args.seeds} seeds were finished.\n")
    lines += [verdict(row, seeds) for row in rows if row.diverged or (row.method != "plain" and not args.quick)]
    if args.quick:
        lines.append("--quick checks the installation only: so few steps and seeds compare nothing.")
    lines.append(READ_ON)
    return "\n".join(lines)
