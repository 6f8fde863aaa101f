"""Measure what the optimizers cost, in three tables.

    python -m benchmarks                                 all three, each in a process, with the defaults below
    python -m benchmarks steps --models cnn --rounds 3   one of them

steps: time and memory of a training step; kernels: how many a step launches on an accelerator, counted on a fake one;
wide: time of a step with many classes. Each table is printed and written to runs/benchmarks/TABLE.json. The pages have
those of --out benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import measure, table
from benchmarks.methods import METHODS
from benchmarks.workloads import ON_CPU, PRECISIONS, WORKLOADS

# The threads of each, and what measures it.
TABLES = {"steps": (1, measure.steps), "kernels": (1, measure.kernels), "wide": (1, measure.wide)}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; plain training is always a row, and the rows keep their order."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=form)
    made.add_argument("table", nargs="?", choices=[*TABLES, "all"], default="all", help="default: all")
    methods = f"rows, beside plain: {'; '.join(list(METHODS)[1:])} (default: all)"
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help=methods)
    made.add_argument("--rounds", type=int, default=9, help="of steps and wide, over all rows (default 9)")
    made.add_argument("--slot", type=float, default=0.3, help="seconds a row and round (default 0.3)")
    made.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder of the files")
    networks = f"of steps: {', '.join(WORKLOADS)}; default: the first {len(ON_CPU)}"
    made.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(ON_CPU), metavar="NAME", help=networks)
    made.add_argument("--device", default="cpu", help="of steps: cpu (default), cuda, cuda:1")
    made.add_argument("--precision", choices=PRECISIONS, default="float32", help="of steps")
    options = made.parse_args(arguments)
    options.methods = [name for name in METHODS if name == "plain" or name in options.methods]
    return options


def run(name: str, options: argparse.Namespace, command: str) -> None:
    """Measure one table in a process, since the fake device changes torch for good; write its file and print it."""
    threads, function = TABLES[name]
    begin = datetime.now(timezone.utc)
    found = measure.in_a_process(function, options, threads=threads)
    results = {
        "date": begin.isoformat(timespec="seconds"),
        "command": command,
        "machine": table.machine(threads, options.device if name == "steps" else "cpu"),
        "versions": table.versions(),
        "minutes": round((datetime.now(timezone.utc) - begin).total_seconds() / 60, 1),
        **found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    lines = [*table.TABLES[name](results), ""]
    if name in ("steps", "wide"):
        lines += [*table.over_by_hand(results[name]), ""]
    print("\n".join([*lines, table.source(results), ""]), flush=True)


def main(arguments: list[str]) -> None:
    """Measure what the command line names."""
    options = parse(arguments)
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    for name in TABLES if options.table == "all" else [options.table]:
        run(name, options, command)


if __name__ == "__main__":
    main(sys.argv[1:])
