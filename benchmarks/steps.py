"""Time all methods on each network side by side, and weigh them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import memory, timing
from benchmarks.methods import METHODS, Row, start
from benchmarks.script import Training
from benchmarks.setting import Setting
from benchmarks.workloads import WORKLOADS, Workload

Figures = dict[str, Any]


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> Figures:
    """All networks; the memory after all times, lest its processes disturb them."""
    setting = Setting(options.device, options.precision, options.compile)
    models = list(dict.fromkeys(options.models))
    found = [{"model": model} | time(WORKLOADS[model], setting, options.rounds, options.slot) for model in models]
    for figures in found:
        weigh(figures, setting)
    return {"setting": asdict(setting), "rounds": options.rounds, "steps": found}


def time(work: Workload, setting: Setting, rounds: int, slot_seconds: float) -> Figures:
    """Time the methods against each other on one network."""
    trainings = {name: start(row, work, setting) for name, row in METHODS.items()}
    steps = {name: training.step for name, training in trainings.items()}
    count = timing.steps_per_slot(steps, slot_seconds, setting.synchronise)
    say(f"{work.title}, batch {work.batch_size}: {rounds} rounds of {len(steps)} rows, {count} steps each")
    times = timing.interleaved(steps, rounds, count, setting.synchronise)
    return {
        "title": work.title,
        "batch_size": work.batch_size,
        "parameters": sum(p.numel() for p in trainings["plain"].model.parameters()),
        "steps_per_slot": count,
        "rows": [row_of(row, times) | _state(trainings[name], trainings["plain"]) for name, row in METHODS.items()],
    }


def row_of(row: Row, times: Mapping[str, list[float]]) -> Figures:
    """What a table has of a method's times."""
    own = times[row.name]
    return {
        "name": row.name,
        "milliseconds": timing.quartiles([1e3 * seconds for seconds in own]),
        "ratio_to_plain": timing.ratios(own, times["plain"]),
        "ratio_to_handwritten": timing.ratios(own, times[row.by_hand]) if row.by_hand else None,
        "rounds_milliseconds": [1e3 * seconds for seconds in own],
    }


def _state(own: Training, plain: Training) -> Figures:
    return {
        "parameters_added": own.parameters_added(),
        "state_bytes_added": own.state_bytes() - plain.state_bytes(),
    }


def weigh(figures: Figures, setting: Setting) -> None:
    """Measure the peak memory of each method in a process."""
    for row in figures["rows"]:
        say(f"{figures['title']}: memory of {row['name']}")
        row["memory"] = memory.ask(figures["model"], row["name"], setting, torch.get_num_threads())
    plain = figures["rows"][0]["memory"]["used_bytes"]
    for row in figures["rows"]:
        row["memory_ratio_to_plain"] = row["memory"]["used_bytes"] / plain
