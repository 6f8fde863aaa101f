"""Steps timed against each other in interleaved rounds: a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

__all__ = ["interleaved", "is_accelerator", "quartiles", "ratios", "seconds_per_step", "steps_per_slot"]

Step = Callable[[], object]
CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether a device runs its work behind the program's back, so that a clock has to wait for it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and device.type == accelerator.type


def seconds_per_step(step: Step, count: int, device: torch.device = CPU) -> float:
    """Time some steps together, with the garbage collector off.

    On an accelerator these are the seconds between two events, with the device idle before the first. With one thread
    they are the seconds of the processor that this process used, which other processes do not lengthen. With more
    threads they are those of the wall clock.

    Args:
        step: takes one step.
        count: how many steps.
        device: where they run. Default: the CPU.

    Returns:
        Seconds a step.
    """
    with _collector_off():
        if is_accelerator(device):
            return _between_events(step, count, device) / count
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        for _ in range(count):
            step()
        return (clock() - begin) / count


def _between_events(step: Step, count: int, device: torch.device) -> float:
    first = torch.Event(device, enable_timing=True)
    last = torch.Event(device, enable_timing=True)
    torch.accelerator.synchronize(device)
    first.record()
    for _ in range(count):
        step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000  # of milliseconds


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


def steps_per_slot(steps: Mapping[str, Step], slot_seconds: float, device: torch.device = CPU) -> int:
    """How many steps of the slowest take a time; all take as many steps, or their noise would differ."""
    slowest = max(min(seconds_per_step(step, 1, device) for _ in range(2)) for step in steps.values())
    return max(1, round(slot_seconds / slowest))


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
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds_per_step(steps[name], count, device))
    return times


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles; a single value is all three."""
    if len(values) < 2:
        return {"median": values[0], "lower": values[0], "upper": values[0]}
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "lower": lower, "upper": upper}


def ratios(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Return the quartiles over the rounds of a time divided by the reference's in the same round."""
    return quartiles([one / other for one, other in zip(times, reference, strict=True)])
