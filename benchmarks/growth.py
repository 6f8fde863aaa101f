"""How the cost grows with the batch, the width, the classes and the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import networks, timing
from benchmarks.measure import say
from benchmarks.methods import METHODS, start
from benchmarks.setting import Setting
from benchmarks.workloads import ON_CPU, Workload

METHODS_TIMED = ("plain", "handwritten DCL", "DCLOptimizer", "DCPOptimizer")
# What the wrapper adds to a step is each method's time minus that of the loop which does the same work without it.
DIFFERENCES = {"DCLOptimizer": "handwritten DCL", "DCPOptimizer": "plain"}


@dataclass(frozen=True)
class Series:
    """One quantity that grows.

    Attributes:
        title: what grows, on what.
        sizes: its values.
        workload: the workload for a value.
    """

    title: str
    sizes: tuple[int, ...]
    workload: Callable[[int], Workload]


def _wider(factor: int) -> Workload:
    return Workload(f"MLP ×{factor}", partial(networks.mlp, factor), (784,), 128)


def _classes(count: int) -> Workload:
    return Workload(f"MLP 512-512-{count}", partial(networks.perceptron, (512, 512, count)), (512,), 128, classes=count)


def _as_wide_as(parameters: int) -> Workload:
    """Two hidden layers of w units between 64 inputs and 10 logits: w² + 76 w + 10 parameters."""
    width = round(math.sqrt(parameters - 10 + 38**2) - 38)
    sizes = (64, width, width, networks.CLASSES)
    return Workload(f"MLP {'-'.join(map(str, sizes))}", partial(networks.perceptron, sizes), (64,), 8)


def _as_deep_as(layers: int) -> Workload:
    sizes = (*[16] * layers, networks.CLASSES)
    return Workload(f"MLP of {layers} layers of 16", partial(networks.perceptron, sizes), (16,), 8)


SERIES: dict[str, Series] = {
    "batch": Series("batch size, CNN", (8, 32, 128, 512), lambda size: replace(ON_CPU["cnn"], batch_size=size)),
    "width": Series("width of the MLP, batch 128", (1, 2, 4, 8), _wider),
    "classes": Series("classes, MLP 512-512-classes, batch 128", (10, 100, 1_000, 10_000), _classes),
    "parameters": Series("parameters in width, batch 8", (10**4, 10**5, 10**6, 10**7, 10**8), _as_wide_as),
    "layers": Series("layers of 16 units, batch 8", (1, 4, 16, 64, 256), _as_deep_as),
}


def measure_size(series: Series, size: int, setting: Setting, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time the methods at one size."""
    work = series.workload(size)
    trainings = {name: start(METHODS[name], work, setting) for name in METHODS_TIMED}
    steps = {name: training.step for name, training in trainings.items()}
    count = timing.steps_per_slot(steps, slot_seconds, setting.synchronise)
    times = timing.interleaved(steps, rounds, count, synchronise=setting.synchronise)
    return {
        "size": size,
        "parameters": sum(p.numel() for p in trainings["plain"].model.parameters()),
        "steps_per_slot": count,
        "rows": [_row(name, times) for name in METHODS_TIMED],
    }


def _row(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    added = timing.microseconds_more(times[name], times[DIFFERENCES[name]]) if name in DIFFERENCES else None
    return {
        "name": name,
        "milliseconds": timing.quartiles([1e3 * seconds for seconds in times[name]]),
        "ratio_to_plain": timing.ratios(times[name], times["plain"]),
        "microseconds_added": added,
        "rounds_milliseconds": [1e3 * seconds for seconds in times[name]],
    }


def measure(name: str, setting: Setting, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time one series."""
    series = SERIES[name]
    points = []
    for size in series.sizes:
        say(f"{series.title}: {size:,}")
        points.append(measure_size(series, size, setting, rounds, slot_seconds))
    return {"name": name, "title": series.title, "points": points}
