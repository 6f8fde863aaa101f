"""A second device in small: the model's thread on one core and the companion's worker on another.

With a core for each, the companion costs what moving and waiting cost. Plain training has the model's core alone, as it
would have its own GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import timing
from benchmarks.measure import say
from benchmarks.methods import plain_row, start
from benchmarks.setting import Setting
from benchmarks.threads import BESIDE, SERIAL, comparison
from benchmarks.workloads import Workload

WORKER = "dcl_optim"  # how the names of the companion's threads begin


def possible(setting: Setting) -> bool:
    """Whether there are two cores, and a system that lets threads be put on them."""
    on_cpu = torch.device(setting.device).type == "cpu"
    return on_cpu and hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1


@contextmanager
def one_thread_each() -> Iterator[None]:
    """One torch thread, and afterwards the threads and the cores as they were."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def a_core_each(worker: int) -> None:
    """Put the calling thread on one core and the worker on another.

    Called when the trainings have begun: on a process with one core the companion gets no worker.
    """
    mine, other, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {mine})
    os.sched_setaffinity(worker, {other})


def new_worker(before: set[int]) -> int:
    """The companion's thread, the one that was not there before.

    Raises:
        RuntimeError: there is none, so that a measurement would not be what it says.
    """
    new = workers() - before
    if len(new) != 1:
        raise RuntimeError(f"expected one new thread named {WORKER}*, found {len(new)}")
    return new.pop()


def workers() -> set[int]:
    """The system's numbers of the companions' threads."""
    return {thread.native_id or 0 for thread in threading.enumerate() if thread.name.startswith(WORKER)}


def measure(work: Workload, setting: Setting, rounds: int, slot_seconds: float) -> dict[str, Any]:
    """Time plain training and the companion after the model on one core, and beside it on another."""
    say(f"{work.title}, batch {work.batch_size}: a core for each network")
    before = workers()
    with one_thread_each():
        trainings = {row.name: start(row, work, setting) for row in (plain_row(), SERIAL, BESIDE)}
        a_core_each(new_worker(before))
        steps = {name: training.step for name, training in trainings.items()}
        count = timing.steps_per_slot(steps, slot_seconds)
        times = timing.interleaved(steps, rounds, count)
    return comparison(times, times[plain_row().name])
