"""What the demo leaves: results.json, the table and verdicts on the terminal, curves.png."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from dcl_optim import __version__
from dcl_optim.demo.arguments import penalty_options
from dcl_optim.demo.digits import TEST_SIZE, VALIDATION_SIZE
from dcl_optim.demo.report import format_table, summarise, verdict
from dcl_optim.demo.training import Histories
from dcl_optim.plots import training_curves


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
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, args.out / "results.json")


def present(args: argparse.Namespace, histories: Histories, interrupted: bool) -> None:
    """Print the table and the verdicts, draw the curves, write the results."""
    save(args, histories, interrupted)
    rows, split = summarise(histories), "validation" if args.validation else "test"
    images = VALIDATION_SIZE if args.validation else TEST_SIZE
    given = ", ".join(f"{name} {value:g}" for name, value in penalty_options(args).items())
    print(
        f"digits: {args.train_size} training and {images} {split} images, {args.epochs} epochs, "
        f"{len(histories['plain'])} seeds; {given or 'default weight and alpha'}\n"
    )
    print(format_table(rows, split), "\n")
    for row in rows[1:]:
        print(verdict(row))
    curves = training_curves(histories, title=f"digits, {args.train_size} training images", split=split)
    curves.savefig(args.out / "curves.png")
    print(f"\nWrote {args.out / 'results.json'} and {args.out / 'curves.png'}.")
