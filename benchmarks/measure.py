"""Time the rows of one table on one workload and write down all that its columns need."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import memory, timing
from benchmarks.methods import Row, start
from benchmarks.script import Training
from benchmarks.setting import Setting
from benchmarks.workloads import Workload

Figures = dict[str, Any]


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)


def chosen(rows: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    """The rows of these names, and plain training, which the others are divided by."""
    if names is None:
        return list(rows)
    wanted = {row.name for row in rows if row.name in names}
    wanted |= {row.reference for row in rows if row.name in names}
    return [row for row in rows if row.name in wanted]


def measure(work: Workload, rows: Sequence[Row], setting: Setting, rounds: int, slot_seconds: float) -> Figures:
    """Time rows against each other on one workload."""
    trainings = {row.name: start(row, work, setting) for row in rows}
    steps = {name: training.step for name, training in trainings.items()}
    count = timing.steps_per_slot(steps, slot_seconds, setting.synchronise)
    say(f"{work.title}, batch {work.batch_size}: {rounds} rounds of {len(steps)} rows, {count} steps each")
    periods = {row.name: row.period for row in rows}
    times = timing.interleaved(steps, rounds, count, _progress(rounds), setting.synchronise, periods)
    return {
        "title": work.title,
        "batch_size": work.batch_size,
        "parameters": sum(p.numel() for p in trainings[rows[0].name].model.parameters()),
        "steps_per_slot": count,
        "rows": [_figures(row, times, trainings) for row in rows],
    }


def _progress(rounds: int) -> Any:
    def report(done: int) -> None:
        if done == rounds or done % 5 == 0:
            say(f"  round {done} of {rounds}")

    return report


def _figures(row: Row, times: Mapping[str, list[float]], trainings: Mapping[str, Training]) -> Figures:
    own, plain = trainings[row.name], trainings[row.reference]
    return {
        "name": row.name,
        "reference": row.reference,
        "milliseconds": timing.quartiles([1e3 * seconds for seconds in times[row.name]]),
        "ratio_to_plain": timing.ratios(times[row.name], times[row.reference]),
        "ratio_to_handwritten": timing.ratios(times[row.name], times[row.by_hand]) if row.by_hand in times else None,
        "parameters_added": own.parameters_added(),
        "state_bytes": own.state_bytes(),
        "state_bytes_added": own.state_bytes() - plain.state_bytes(),
        "rounds_milliseconds": [1e3 * seconds for seconds in times[row.name]],
    }


def add_memory(figures: Figures, model: str, setting: Setting, threads: int, known: dict[str, Figures]) -> None:
    """Measure the peak memory of every row, unless ``known`` has it from another table of this workload."""
    for row in figures["rows"]:
        if row["name"] not in known:
            say(f"  memory of {row['name']}")
            known[row["name"]] = memory.ask(model, row["name"], setting, threads)
        row["memory"] = known[row["name"]]
    for row in figures["rows"]:
        row["memory_ratio_to_plain"] = row["memory"]["used_bytes"] / known[row["reference"]]["used_bytes"]
