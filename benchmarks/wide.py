"""Time and weigh the methods on a network whose logits are most of it: many classes.

python -m benchmarks wide --name wide   # about ten minutes, one thread
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import memory, report, table, timing
from benchmarks.measure import say
from benchmarks.methods import BY_HAND_AND_WRAPPED, METHODS, start
from benchmarks.networks import Network, perceptron
from benchmarks.run import positive
from benchmarks.setting import Setting
from benchmarks.workloads import Workload

CLASSES, ROWS = (10, 1_000, 8_000, 50_000), 256
WEIGHED = ((8_000, 1_024), (50_000, 1_024))  # classes and rows whose memory is measured
MOST_BYTES = 2**30  # of DCPOptimizer's prototypes


class CastInside(Network):
    """A network whose forward runs under autocast, so that the script's loss does not."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)


def cast_inside(sizes: tuple[int, ...]) -> nn.Module:
    """The perceptron of these sizes, its forward under autocast."""
    return CastInside(*perceptron(sizes).children())


FLOAT32, LOSS_INSIDE, LOSS_OUTSIDE = "float32", "autocast", "autocast, loss outside"
PRECISIONS = {
    FLOAT32: (perceptron, Setting()),
    LOSS_INSIDE: (perceptron, Setting(precision="bf16-channels-last")),
    LOSS_OUTSIDE: (cast_inside, Setting()),
}


def workload(classes: int, rows: int, precision: str) -> tuple[Workload, Setting]:
    """A network that is little but its head, and what it runs in."""
    build, setting = PRECISIONS[precision]
    work = Workload(f"MLP 64-128-{classes}", partial(build, (64, 128, classes)), (64,), rows, classes=classes)
    return work, setting


def names(classes: int) -> list[str]:
    """The methods that so many classes allow."""
    return [name for name in BY_HAND_AND_WRAPPED if "DCP" not in name or 4 * classes**2 <= MOST_BYTES]


def times(classes: int, precision: str, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time the methods against each other at one number of classes."""
    work, setting = workload(classes, ROWS, precision)
    steps = {name: start(METHODS[name], work, setting).step for name in names(classes)}
    count = timing.steps_per_slot(steps, slot_seconds)
    say(f"{classes:,} classes, {precision}: {rounds} rounds of {len(steps)} methods, {count} steps each")
    found = timing.interleaved(steps, rounds, count)
    rows = [
        {
            "name": name,
            "milliseconds": timing.quartiles([1e3 * seconds for seconds in found[name]]),
            "ratio_to_plain": timing.ratios(found[name], found["plain"]),
            "ratio_to_handwritten": timing.ratios(found[name], found[METHODS[name].by_hand])
            if METHODS[name].by_hand
            else None,
        }
        for name in steps
    ]
    return {"classes": classes, "precision": precision, "steps_per_slot": count, "rows": rows}


def weigh(classes: int, rows: int, precision: str, name: str) -> dict[str, Any]:
    """Measure the peak memory of one method in a fresh process."""
    say(f"memory of {name}, {classes:,} classes × {rows:,} rows, {precision}")
    words = ["--weigh", name, "--classes", str(classes), "--rows", str(rows), "--precision", precision]
    figures = memory.answer(f"{name} with {classes} classes", "benchmarks", "wide", *words)
    return {"classes": classes, "rows": rows, "precision": precision, "name": name} | figures


def main(arguments: list[str]) -> None:
    """Measure, write the JSON file, print the tables; or be the process in which one method is weighed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks wide", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--classes", nargs="+", type=positive(int), default=list(CLASSES), help="how many to time")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), metavar="NAME",
                        help=", ".join(PRECISIONS))  # fmt: skip
    parser.add_argument("--rounds", type=positive(int), default=7, help="rounds over all methods (default 7)")
    parser.add_argument("--slot", type=positive(float), default=0.5, help="seconds a method and round (default 0.5)")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory out")
    parser.add_argument("--weigh", choices=BY_HAND_AND_WRAPPED, metavar="NAME", help="print one method's memory alone")
    parser.add_argument("--rows", type=positive(int), default=ROWS, help="rows of the batch that is weighed")
    report.add_options(parser, "wide")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.weigh:
        row = METHODS[options.weigh]
        work, setting = workload(options.classes[0], options.rows, options.precision[0])
        memory.import_everything(row, "")
        print(json.dumps(memory.used_by(lambda: start(row, work, setting, memory.STEPS))))
        return
    points = [
        times(classes, precision, options.rounds, options.slot)
        for classes, precision in itertools.product(options.classes, options.precision)
    ]
    weighed = [
        weigh(classes, rows, precision, name)
        for (classes, rows), precision in itertools.product(WEIGHED, options.precision)
        if not options.no_memory and precision != LOSS_INSIDE
        for name in names(classes)
    ]
    figures = {"batch": ROWS, "rounds": options.rounds, "wide": points, "wide_memory": weighed}
    results = report.results(options, ["wide", *arguments]) | figures
    report.write(options, results)
    print(table.markdown(results))
