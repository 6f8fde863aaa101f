"""Time what you choose, side by side, and write the figures to a JSON file with a table and an image."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import growth, knobs, measure, plot, report, table
from benchmarks.allocator import freed_memory_kept
from benchmarks.measure import say
from benchmarks.methods import METHODS, Row, missing
from benchmarks.setting import PRECISIONS, Setting
from benchmarks.workloads import ON_CPU, ON_CUDA, WORKLOADS

PARTS = ("methods", "knobs", "memory", "growth")
# Without --models: a table of all methods on each network, and the knobs where they differ most.
DEFAULT_MODELS = {
    "cpu": {"methods": list(ON_CPU), "knobs": ["cnn", "resnet18"]},
    "cuda": {"methods": [*ON_CPU, *ON_CUDA], "knobs": ["resnet18-128"]},
}


def positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a positive number."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="python -m benchmarks table FILE prints a file's tables, python -m benchmarks plot FILE draws it; "
        "python -m benchmarks kernels and python -m benchmarks wide measure further costs",
    )
    rows = ", ".join(dict.fromkeys([*METHODS, *knobs.KNOBS]))
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    made.add_argument("--models", nargs="+", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    made.add_argument("--methods", nargs="+", metavar="NAME", help=f"rows of the tables beside plain: {rows}")
    made.add_argument("--series", nargs="+", choices=growth.SERIES, default=list(growth.SERIES), metavar="NAME",
                      help=f"what grows: {', '.join(growth.SERIES)}")  # fmt: skip
    made.add_argument("--rounds", type=positive(int), default=11, help="rounds over all rows (default 11)")
    made.add_argument("--threads", type=positive(int), default=2, help="torch.set_num_threads (default 2)")
    made.add_argument("--slot", type=positive(float), default=0.2, help="seconds a row and round (default 0.2)")
    made.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    made.add_argument("--precision", choices=PRECISIONS, default="float32", help=" or ".join(PRECISIONS))
    made.add_argument("--compile", action="store_true", help="compile the networks")
    report.add_options(made, "run")
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line and refuse what cannot be run before anything is measured."""
    made = parser()
    options = made.parse_args(arguments)
    unknown = sorted(set(options.methods or []) - set(METHODS) - set(knobs.KNOBS))
    if unknown:
        made.error(f"argument --methods: unknown {', '.join(map(repr, unknown))}; choose from --help's")
    try:
        kind = torch.device(options.device).type
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        made.error(f"argument --device: {options.device!r} cannot be used: {error}")
    defaults = DEFAULT_MODELS["cuda" if kind == "cuda" else "cpu"]
    options.of_part = {part: list(dict.fromkeys(options.models or models)) for part, models in defaults.items()}
    lacking = missing({package for part in options.parts for package in _packages(part, options)})
    if lacking:
        made.error(lacking)
    return options


def _packages(part: str, options: argparse.Namespace) -> Iterable[str]:
    for model in options.of_part.get(part, ()):
        yield WORKLOADS[model].package
        if part in ("methods", "knobs"):
            yield from (row.package for row in _rows(part, model, options))


def _rows(part: str, model: str, options: argparse.Namespace) -> list[Row]:
    rows = list(METHODS.values()) if part == "methods" else knobs.rows_for(WORKLOADS[model])
    return measure.chosen(rows, options.methods)


def _tables(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """The parts that are tables of rows, and their memory: after all times, lest the processes disturb them."""
    found: dict[str, Any] = {
        part: [
            {"model": model} | measure.measure(WORKLOADS[model], rows, setting, options.rounds, options.slot)
            for model in options.of_part[part]
            if (rows := _rows(part, model, options))
        ]
        for part in ("methods", "knobs")
        if part in options.parts
    }
    if "memory" in options.parts:
        known: dict[str, dict[str, Any]] = {}
        for figures in [figures for part in found.values() for figures in part]:
            say(f"{figures['title']}, batch {figures['batch_size']}")
            measure.add_memory(
                figures, figures["model"], setting, options.threads, known.setdefault(figures["model"], {})
            )
    return found


def _measure_all(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    parts = _tables(options, setting)
    if "growth" in options.parts:
        with freed_memory_kept() as parts["freed_memory_kept"]:
            parts["growth"] = [
                growth.measure(name, setting, options.rounds, options.slot) for name in dict.fromkeys(options.series)
            ]
    return parts


def main(arguments: list[str]) -> None:
    """Measure, write the JSON file, draw it, print the tables."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    setting = Setting(options.device, options.precision, options.compile)
    measured = _measure_all(options, setting)
    head = report.results(options, arguments, options.device)
    results = head | {"setting": asdict(setting), "rounds": options.rounds} | measured
    path = report.write(options, results)
    try:
        for drawn in plot.draw(results, path):
            say(f"drew {drawn}")
    except ImportError as error:
        say(f"no figures: {error}")
    print(table.markdown(results))
