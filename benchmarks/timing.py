"""Interleaved rounds: what a noisy machine does to one method it does to its neighbours too."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Steps = dict[str, Callable[[], None]]
Synchronise = Callable[[], None]


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector out of the timed region; collect what the region before has piled up."""
    was_on = gc.isenabled()
    gc.collect(
        0
    )  # with the collector off nothing has grown older; all of torch's objects would take longer than a slot
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def seconds_per_step(step: Callable[[], None], steps: int, synchronise: Synchronise = lambda: None) -> float:
    """Time one slot, with the device idle before and after."""
    with collector_off():
        synchronise()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise()
        return (time.perf_counter() - begin) / steps


def steps_per_slot(steps: Steps, slot_seconds: float, synchronise: Synchronise = lambda: None) -> int:
    """How many steps give the slowest method the wanted slot; the same number for all, or their noise would differ."""
    slowest = max(min(seconds_per_step(step, 1, synchronise) for _ in range(2)) for step in steps.values())
    return max(1, round(slot_seconds / slowest))


def interleaved(
    steps: Steps, rounds: int, count: int, synchronise: Synchronise = lambda: None
) -> dict[str, list[float]]:
    """Seconds per step of every method in every round; each round starts with another method."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds_per_step(steps[name], count, synchronise))
    return times


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and quartiles; a single value is its own quartiles."""
    if len(values) < 2:
        return {"median": values[0], "lower": values[0], "upper": values[0]}
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "lower": lower, "upper": upper}


def ratios(times: list[float], reference: list[float]) -> dict[str, float]:
    """Quartiles over the rounds of time divided by the reference's time in the same round."""
    return quartiles([time / other for time, other in zip(times, reference, strict=True)])
