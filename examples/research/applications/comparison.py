"""What the applications share: rows over the same seeds, a results file, a table, a command line."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dcl_optim.trial.paired import mean_and_error, plus_minus, probability_cell
from examples.research import records
from examples.research.arguments import Parser, add_device, number
from examples.research.datasets.splits import PARTS
from examples.research.extras import explain
from examples.research.records import Record
from examples.research.table import by_seed, probability


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        options: what ``train`` gets beside the settings.
        against: the label of the row that it is compared to; None: none.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None


@dataclass(frozen=True)
class Application:
    """A training and the ways to run it.

    Attributes:
        name: of the results file, application-<name>.jsonl.
        score: what ``train`` returns, in per cent; more is better.
        train: called with the settings, a row's options, ``seed``, ``device`` and ``progress``, which it calls with a
            text after each epoch. It seeds itself, so that the rows of a seed start alike and see the same batches.
        rows: by label.
        settings: names and default values of what the command line can change.
        bounds: the lowest and, if there is one, the highest value of the numbers among them that are not at least 1 if
            they are whole, and at least 0 if they are not.
    """

    name: str
    score: str
    train: Callable[..., float]
    rows: Mapping[str, Row]
    settings: Mapping[str, Any]
    bounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def run(application: Application, options: argparse.Namespace) -> list[Record]:
    """Make the runs that have no results, with ``--fresh`` in the repository's files too; give what the table shows."""
    settings = {name: getattr(options, name) for name in application.settings}
    path, configurations = results_file(application, options.results), _configurations(application, settings)

    def known() -> list[Record]:
        return made(application, settings, path) if options.fresh else finished(application, settings, options.results)

    done = {(r["label"], r["seed"]) for r in known()}
    runs = [(label, seed) for seed in range(options.seeds) for label in options.only or application.rows]
    wanted = [run for run in runs if run not in done]
    if not wanted:
        print(records.nothing_to_do(application.name, len(runs), options.results), file=sys.stderr)
        return known()
    with tqdm(wanted, desc=application.name, unit="run", disable=None) as bar:
        for label, seed in bar:
            begin, device = time.perf_counter(), torch.device(options.device)

            def progress(text: str, label: str = label, seed: int = seed) -> None:
                bar.set_postfix_str(f"{label}, seed {seed}: {text}")

            score = application.train(**configurations[label], seed=seed, device=device, progress=progress)
            record = {"label": label, "seed": seed, "configuration": configurations[label], "score": score}
            record |= {"seconds": time.perf_counter() - begin}
            records.append(record | records.circumstances(options.device, torch.get_num_threads()), path)
    return known()


def finished(application: Application, settings: Mapping[str, Any], folder: Path) -> list[Record]:
    """The finished runs with these settings, those in the repository and those in a folder."""
    return _with(application, settings, records.finished(folder, results_file(application, folder).name))


def made(application: Application, settings: Mapping[str, Any], path: Path) -> list[Record]:
    """The finished runs with these settings in a file."""
    return _with(application, settings, records.read(path))


def _with(application: Application, settings: Mapping[str, Any], found: Sequence[Record]) -> list[Record]:
    configurations = _configurations(application, settings)
    return [r for r in found if r["configuration"] == configurations.get(r["label"])]


def _configurations(application: Application, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What ``train`` gets for each row."""
    return {label: {**settings, **row.options} for label, row in application.rows.items()}


def results_file(application: Application, folder: Path) -> Path:
    """Where the runs are written down."""
    return folder / f"application-{application.name}.jsonl"


def table(application: Application, found: Sequence[Record]) -> str:
    """The rows in Markdown: mean and standard error, and the paired difference to the row that each is held against."""
    scores = {label: {r["seed"]: r["score"] for r in found if r["label"] == label} for label in application.rows}
    lines = [f"| | {application.score} | difference | p | seconds | seeds |", "|---|--:|--:|--:|--:|--:|"]
    for label, row in application.rows.items():
        if not scores[label]:
            continue
        ours, theirs = scores[label], scores.get(row.against or "", {})
        differences = by_seed(ours, theirs)
        shown = plus_minus(*mean_and_error(differences), sign="+") if differences else ""
        seconds = statistics.median(r["seconds"] for r in found if r["label"] == label)
        mean = plus_minus(*mean_and_error(list(ours.values())))
        cells = (label, mean, shown, probability_cell(probability(differences)))
        lines.append(f"| {' | '.join(cells)} | {seconds:.0f} | {len(ours)} |")
    return "\n".join(lines)


def parser(application: Application, description: str | None) -> argparse.ArgumentParser:
    """The command line: the application's settings, and what all have."""
    name = application.name.replace("-", "_")
    made = Parser(
        prog=f"python -m examples.research.applications.{name}", description=(description or "").split("\n")[0]
    )
    for name, value in application.settings.items():
        kind: Any = str
        if isinstance(value, (int, float)):
            kind = number(type(value), *application.bounds.get(name, (int(isinstance(value, int)),)))
        choices = PARTS[1:] if name == "part" else None
        made.add_argument(
            f"--{name.replace('_', '-')}", type=kind, choices=choices, default=value, help=f"(default {value})"
        )
    made.add_argument("--seeds", type=number(int, 1), default=3, help="runs of each row (default 3)")
    made.add_argument("--only", nargs="+", metavar="ROW", choices=tuple(application.rows), help="these rows only")
    made.add_argument("--threads", type=number(int, 1), help="of torch (default: torch's own)")
    made.add_argument("--fresh", action="store_true", help=f"train runs of {records.COMMITTED} too")
    add_device(made)
    own, known = records.RESULTS, records.COMMITTED
    made.add_argument("--results", type=Path, default=own, help=f"their folder, beside {known} (default {own})")
    return made


def main(application: Application, description: str | None, arguments: Sequence[str] | None = None) -> None:
    """Run an application from the command line and print its table."""
    made = parser(application, description)
    options = made.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        print(table(application, run(application, options)))
    except (ValueError, ImportError, OSError) as error:
        made.error(explain(error) or str(error))
