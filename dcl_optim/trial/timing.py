"""Steps timed against each other in interleaved rounds: a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["interleaved", "is_accelerator", "quartiles", "ratios", "seconds_per_step"]

Step = Callable[[], object]
CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether a device runs its work behind the program's back, so that a clock has to wait for it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and device.type == accelerator.type


def seconds_per_step(step: Step, count: int, device: torch.device = CPU) -> float:
    """Time some steps together, with the garbage collector off.

    On an accelerator these are seconds of the wall clock, with the device idle before the first step and after the last
    one. With one thread they are the seconds of the processor that this process used, which other processes do not
    lengthen. With more threads they are those of the wall clock.

    Args:
        step: takes one step.
        count: how many steps.
        device: where they run. Default: the CPU.

    Returns:
        Seconds a step.
    """
    with _collector_off():
        begin = _clock(device)
        for _ in range(count):
            step()
        return (_clock(device) - begin) / count


def _clock(device: torch.device) -> float:
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


@contextmanager
def _collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    # The youngest objects alone: with the collector off none has grown older, and all of torch's would take too long.
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def interleaved(
    steps: Mapping[str, Step], rounds: int, count: int, device: torch.device = CPU
) -> dict[str, list[float]]:
    """Time several steps against each other.

    Args:
        steps: what takes one step, by its name.
        rounds: in each of them every name has one slot, and another name is the first.
        count: steps in a slot.
        device: where they run. Default: the CPU.

    Returns:
        Seconds a step by the name, one value for each round.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = deque(steps)
    for _ in range(rounds):
        for name in order:
            times[name].append(seconds_per_step(steps[name], count, device))
        order.rotate(-1)
    return times


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles; a single value is all three."""
    return dict(zip(("lower", "median", "upper"), np.quantile(values, (0.25, 0.5, 0.75)).tolist(), strict=True))


def ratios(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Return the quartiles over the rounds of a time divided by the reference's in the same round."""
    return quartiles([one / other for one, other in zip(times, reference, strict=True)])
