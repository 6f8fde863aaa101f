"""The first step and the memory of many classes: ``python -m benchmarks.first_steps --rows 256 --precision autocast``.

Each method runs in a process of its own: the time of its first step over that of a later one, and its peak resident
set after all steps over that of the loop written by hand.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from functools import partial

import torch

from benchmarks.memory import resident_peak
from benchmarks.methods import METHODS, start
from benchmarks.networks import perceptron
from benchmarks.wide import PRECISIONS
from benchmarks.workloads import Workload

BY_HAND = "DCL, by hand"
NAMES = (BY_HAND, "DCL, line", "DCL, term")


def run(name: str, classes: int, rows: int, precision: str, steps: int) -> tuple[float, int]:
    """Train a few steps; give the first one's time over the later ones' median, and the peak resident set in bytes."""
    torch.set_num_threads(1)
    work = Workload(f"MLP 64-128-{classes}", partial(perceptron, (64, 128, classes)), (64,), rows, classes=classes)
    step = start(METHODS[name], work, PRECISIONS[precision]).step
    seconds = []
    for _ in range(steps):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    return seconds[0] / statistics.median(seconds[1:]), resident_peak()


def main(arguments: list[str] | None = None) -> None:
    """Print a line a method."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps", description=__doc__)
    parser.add_argument("--classes", type=int, default=50_000, help="K (default 50,000)")
    parser.add_argument("--rows", type=int, default=256, help="N (default 256)")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--steps", type=int, default=6, help="at least 2 (default 6)")
    options = parser.parse_args(arguments)
    settings = (options.classes, options.rows, options.precision, options.steps)
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in NAMES:
        with context.Pool(1) as pool:
            found[name] = pool.apply(run, (name, *settings))
    print("| method | first step over a later one | peak resident set, MiB | over by hand |\n| --- | --: | --: | --: |")
    for name, (first, peak) in found.items():
        print(f"| {name} | {first:.2f} | {peak / 2**20:,.0f} | {peak / found[BY_HAND][1]:.2f} |")


if __name__ == "__main__":
    main()
