"""The wrapper's own time on steps of a millisecond, where it shows: plain, hand-written DCL and both optimizers.

    python -m benchmarks.small_steps --out benchmarks/results/small-steps.json   # about two minutes, one thread

One interleaved run; a ratio is taken within its round. The steps of the CNN are above ten milliseconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine, versions
from benchmarks.methods import METHODS, start
from benchmarks.networks import perceptron
from benchmarks.timing import interleaved, quartiles, ratios, steps_per_slot
from benchmarks.workloads import ON_CPU, Workload

SMALL = Workload("MLP 64-256-256-10", lambda: perceptron((64, 256, 256, 10)), (64,), 128)
WORKLOADS = [SMALL, ON_CPU["cnn"]]


ROWS = [
    METHODS["plain"],
    METHODS["handwritten"],
    METHODS["DCLOptimizer"],
    METHODS["DCPOptimizer"],
]


def measure(work: Workload, rounds: int) -> dict[str, dict[str, Any]]:
    """Time all methods on one workload; quartiles of milliseconds and of the ratios to plain and hand-written steps."""
    steps = {row.name: start(row, work).step for row in ROWS}
    times = interleaved(steps, rounds, steps_per_slot(steps, slot_seconds=0.05))
    return {
        name: {
            "milliseconds": quartiles([1e3 * value for value in values]),
            "over plain": ratios(values, times["plain"]),
            "over handwritten": ratios(values, times["handwritten"]),
        }
        for name, values in times.items()
    }


def show(title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print the table of one workload."""
    print(f"{title:<26}" + "".join(f"{column:>24}" for column in found["plain"]))
    for name, row in found.items():
        cells = (f"{q['median']:.3f} ({q['lower']:.3f}-{q['upper']:.3f})" for q in row.values())
        print(f"{name:<26}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"machine": machine(), "versions": versions(), "rounds": options.rounds, "workloads": {}}
    for work in WORKLOADS:
        result["workloads"][work.title] = measure(work, options.rounds)
        show(f"{work.title}, {work.batch_size}", result["workloads"][work.title])
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
