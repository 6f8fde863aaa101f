"""Time the methods on a network whose logits are most of it: many classes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import timing
from benchmarks.methods import METHODS, start
from benchmarks.networks import perceptron
from benchmarks.setting import Setting
from benchmarks.steps import row_of, say
from benchmarks.workloads import Workload

CLASSES, ROWS = (10, 1_000, 8_000, 50_000), 256
PRECISIONS = {"float32": Setting(), "autocast": Setting(precision="bf16-channels-last")}
MOST_BYTES = 2**30  # of DCPOptimizer's prototypes


def names(classes: int) -> list[str]:
    """The methods that so many classes allow."""
    return [name for name in METHODS if "DCP" not in name or 4 * classes**2 <= MOST_BYTES]


def times(classes: int, precision: str, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time the methods against each other at one number of classes."""
    work = Workload(f"MLP 64-128-{classes}", partial(perceptron, (64, 128, classes)), (64,), ROWS, classes=classes)
    steps = {name: start(METHODS[name], work, PRECISIONS[precision]).step for name in names(classes)}
    count = timing.steps_per_slot(steps, slot_seconds)
    say(f"{classes:,} classes, {precision}: {rounds} rounds of {len(steps)} methods, {count} steps each")
    found = timing.interleaved(steps, rounds, count)
    rows = [row_of(METHODS[name], found) for name in steps]
    return {"classes": classes, "precision": precision, "steps_per_slot": count, "rows": rows}


def measure(options: argparse.Namespace, classes: Sequence[int] = CLASSES) -> dict[str, Any]:
    """All numbers of classes in both precisions."""
    points = [
        times(count, precision, options.rounds, options.slot)
        for count, precision in itertools.product(classes, PRECISIONS)
    ]
    return {"batch": ROWS, "rounds": options.rounds, "wide": points}
