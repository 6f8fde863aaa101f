"""What running the companion beside the model gains on this machine, and what it could gain at best.

Two networks that run at once have half of the cores each. So the bound is plain training on half of the threads divided
by plain training on all of them, and a machine whose cores one network already fills has little to give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import timing
from benchmarks.knobs import KNOBS
from benchmarks.measure import say
from benchmarks.methods import METHODS, plain_row, start
from benchmarks.setting import Setting
from benchmarks.workloads import Workload

SERIAL, BESIDE = METHODS["DCLOptimizer"], KNOBS["overlap=True"].row()


def on(threads: int, step: Callable[[], None]) -> Callable[[], None]:
    """The step on a number of threads."""

    def run() -> None:
        torch.set_num_threads(threads)
        step()

    return run


def measure(work: Workload, setting: Setting, threads: int, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time plain training on all and on half of the threads, and the companion after and beside the model."""
    half = max(1, threads // 2)
    plain = start(plain_row(), work, setting).step
    steps = {"all": on(threads, plain), "half": on(half, plain)}
    steps |= {row.name: on(threads, start(row, work, setting).step) for row in (SERIAL, BESIDE)}
    count = timing.steps_per_slot(steps, slot_seconds, setting.synchronise)
    say(f"{work.title}, batch {work.batch_size}: overlap on {threads} threads")
    try:
        times = timing.interleaved(steps, rounds, count, synchronise=setting.synchronise)
    finally:
        torch.set_num_threads(threads)
    return {
        "title": work.title,
        "batch_size": work.batch_size,
        "threads": threads,
        "half": half,
        "bound": timing.ratios(times["half"], times["all"]),
        **comparison(times, times["all"]),
    }


def comparison(times: dict[str, list[float]], plain: list[float]) -> dict[str, Any]:
    """The companion after the model and beside it, both divided by plain training."""
    return {
        "serial": timing.ratios(times[SERIAL.name], plain),
        "beside": timing.ratios(times[BESIDE.name], plain),
        "rounds_milliseconds": {name: [1e3 * t for t in of_name] for name, of_name in times.items()},
    }
