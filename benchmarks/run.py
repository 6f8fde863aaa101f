"""Time every method on the chosen networks and write the figures to a JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import table, timing
from benchmarks.machine import machine, versions
from benchmarks.methods import METHODS, start
from benchmarks.models import WORKLOADS


def positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a positive number."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog="python -m benchmarks table FILE prints the table"
    )
    made.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    made.add_argument("--rounds", type=positive(int), default=21, help="rounds over all methods (default 21)")
    made.add_argument("--threads", type=positive(int), default=2, help="torch.set_num_threads (default 2)")
    made.add_argument("--slot", type=positive(float), default=0.2, help="seconds per method and round (default 0.2)")
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    made.add_argument("--name", help="the JSON file's name without .json (default: the date and the threads)")
    return made


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(name: str, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time every method on one network."""
    work = WORKLOADS[name]
    trainings = {method: start(method, work.model(), work.batches()) for method in METHODS}
    steps = {method: training.step for method, training in trainings.items()}
    count = timing.steps_per_slot(steps, slot_seconds)
    _say(f"{work.title}, batch {work.batch_size}: {rounds} rounds of {len(steps)} methods, {count} steps each")
    times = timing.interleaved(steps, rounds, count, lambda done: _say(f"  round {done} of {rounds}"))
    methods = [
        {
            "name": method,
            "milliseconds": timing.quartiles([1e3 * seconds for seconds in times[method]]),
            "ratio_to_plain": timing.ratios(times[method], times["plain"]),
            "ratio_to_handwritten": timing.ratios(times[method], times["handwritten"]),
            "memory": trainings[method].memory(),
            "rounds_milliseconds": [1e3 * seconds for seconds in times[method]],
        }
        for method in METHODS
    ]
    return {
        "name": name,
        "title": work.title,
        "batch_size": work.batch_size,
        "parameters": sum(p.numel() for p in trainings["plain"].model.parameters()),
        "steps_per_slot": count,
        "methods": methods,
    }


def main(arguments: list[str]) -> None:
    """Measure, write the JSON file, print the table."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    now = datetime.datetime.now(datetime.timezone.utc)
    name = options.name or f"{now:%Y-%m-%d}-{options.threads}-threads"
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": machine(),
        "versions": versions(),
        "rounds": options.rounds,
        "models": [measure(model, options.rounds, options.slot) for model in dict.fromkeys(options.models)],
    }
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _say(f"wrote {path}")
    print(table.markdown(results))
