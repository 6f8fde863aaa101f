"""Measure what the optimizers cost, in three tables.

    python -m benchmarks                                 all three, each in a process, with the defaults below
    python -m benchmarks steps --models cnn --rounds 3   one of them

steps: time, memory and state of a training step; kernels: how many a step launches on an accelerator, counted on a fake
one; wide: time of a step with many classes. Each table is printed and written to runs/benchmarks/TABLE.json. The pages
have those of --out benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, table
from benchmarks.methods import METHODS
from benchmarks.workloads import ON_CPU, PRECISIONS, WORKLOADS

# The threads of each, what estimates its seconds, and what measures it.
TABLES = {
    "steps": (2, measure.seconds_of_steps, measure.steps),
    "kernels": (1, measure.seconds_of_kernels, measure.kernels),
    "wide": (1, measure.seconds_of_wide, measure.wide),
}


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
    methods = f"rows, beside plain: {'; '.join(list(METHODS)[1:])} (default: all)"
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help=methods)
    made.add_argument("--rounds", type=positive(int), default=9, help="of steps and wide, over all rows (default 9)")
    made.add_argument("--slot", type=positive(float), default=0.3, help="seconds a row and round (default 0.3)")
    made.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder of the files")
    networks = f"of steps: {', '.join(WORKLOADS)}; default: the first {len(ON_CPU)}"
    made.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(ON_CPU), metavar="NAME", help=networks)
    made.add_argument("--no-memory", dest="memory", action="store_false", help="of steps: a process for each row less")
    made.add_argument("--device", default="cpu", help="of steps: cpu (default), cuda, cuda:1")
    made.add_argument("--precision", choices=PRECISIONS, default="float32", help=f"of steps: {' or '.join(PRECISIONS)}")
    made.add_argument("--compile", action="store_true", help="compile the networks of steps")
    options = made.parse_args(arguments)
    options.models = list(dict.fromkeys(options.models))
    options.methods = [name for name in METHODS if name == "plain" or name in options.methods]
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


def announce(names: list[str], options: argparse.Namespace) -> None:
    """Say on stderr about how long it takes."""
    minutes = {}
    for name in names:
        threads, seconds_of, _ = TABLES[name]
        torch.set_num_threads(threads)
        minutes[name] = seconds_of(options) / 60
    each = ", ".join(f"{name} {value:.1f}" for name, value in minutes.items())
    print(f"about {sum(minutes.values()):.1f} minutes if nothing else runs: {each}", file=sys.stderr, flush=True)


def run(name: str, options: argparse.Namespace, command: str) -> None:
    """Measure one table in a process, since the fake device changes torch for good; write its file and print it."""
    threads, _, function = TABLES[name]
    begin = datetime.datetime.now(datetime.timezone.utc)
    found = measure.in_a_process(function, options, threads=threads)
    results = {
        "date": begin.isoformat(timespec="seconds"),
        "command": command,
        "machine": table.machine(threads, options.device if name == "steps" else "cpu"),
        "versions": table.versions(),
        "minutes": round((datetime.datetime.now(datetime.timezone.utc) - begin).total_seconds() / 60, 1),
        **found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*table.TABLES[name](results), "", table.source(results), ""]), flush=True)


def main(arguments: list[str]) -> None:
    """Measure the tables that the command line names."""
    options = parse(arguments)
    names = options.tables or list(TABLES)
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    announce(names, options)
    for name in names:
        run(name, options, command)


if __name__ == "__main__":
    main(sys.argv[1:])
