"""Measure what the optimizers cost, in three tables.

    python -m benchmarks                                 all three, each in a process, with the defaults below
    python -m benchmarks steps --models cnn --rounds 3   one of them

steps: time, memory and state of a training step; kernels: how many a step launches on an accelerator, counted on a fake
one; wide: time of a step with many classes. Each table is printed and written to benchmarks/results/TABLE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels, machine, steps, table, wide
from benchmarks.setting import PRECISIONS
from benchmarks.workloads import ON_CPU, WORKLOADS

# The threads of each, and what measures it.
TABLES = {"steps": (2, steps.measure), "kernels": (1, kernels.measure), "wide": (1, wide.measure)}


def positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a positive number."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line and refuse what cannot be run before anything is measured."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=form)
    made.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (default: all)")
    made.add_argument("--rounds", type=positive(int), default=9, help="of steps and wide, over all rows (default 9)")
    made.add_argument("--slot", type=positive(float), default=0.3, help="seconds a row and round (default 0.3)")
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the files")
    networks = f"of steps: {', '.join(WORKLOADS)}; default: the first {len(ON_CPU)}"
    made.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(ON_CPU), metavar="NAME", help=networks)
    made.add_argument("--device", default="cpu", help="of steps: cpu (default), cuda, cuda:1")
    made.add_argument("--precision", choices=PRECISIONS, default="float32", help=f"of steps: {' or '.join(PRECISIONS)}")
    made.add_argument("--compile", action="store_true", help="compile the networks of steps")
    options = made.parse_args(arguments)
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        made.error(f"there is no table {unknown[0]!r}; choose from {', '.join(TABLES)}")
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        made.error(f"argument --device: {options.device!r} cannot be used: {error}")
    packages = {WORKLOADS[model].package for model in options.models} - {""}
    missing = sorted(package for package in packages if find_spec(package) is None)
    if missing:
        made.error(f"{', '.join(missing)} is missing: pip install {' '.join(missing)}")
    return options


def run(name: str, options: argparse.Namespace, command: str) -> None:
    """Measure one table, write its file and print it."""
    threads, measure = TABLES[name]
    torch.set_num_threads(threads)
    begin = datetime.datetime.now(datetime.timezone.utc)
    found = measure(options)
    results = {
        "date": begin.isoformat(timespec="seconds"),
        "command": command,
        "machine": machine.machine(options.device if name == "steps" else "cpu"),
        "versions": machine.versions(),
        "minutes": round((datetime.datetime.now(datetime.timezone.utc) - begin).total_seconds() / 60, 1),
        **found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*table.TABLES[name](results), "", table.source(results), ""]), flush=True)


def main(arguments: list[str]) -> None:
    """Measure each table in a process: the fake device changes torch for good."""
    options = parse(arguments)
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    for name in options.tables or TABLES:
        process = multiprocessing.get_context("spawn").Process(target=run, args=(name, options, command))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
