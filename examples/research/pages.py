"""The tables of the pages that come from the records; docs/results_tables.py has cog write them into the pages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcl_optim.trial.comparison import Comparison
from examples.research import evidence, fraction, gain_tables, pays, records, size, tabular
from examples.research import wrong_labels as rows_with_wrong_labels
from examples.research.applications import fine_tuning
from examples.research.experiments import EXPERIMENTS
from examples.research.gain_tables import by_measure
from examples.research.gains import Row, by_gain
from examples.research.rivals import companion_tables, tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "examples" / "research" / "results"


def demo(name: str = "demo") -> str:
    """The demo's table, as it prints it."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return f"```text\n{Comparison(found['curves'], found['seeds'])}\n```"


OVERVIEW = {  # of the settings in which methods were tuned, by what decides
    "kanji-5": "few images: 150 Japanese characters, 5 of each",
    "kanji-5-noise-20": "wrong labels: the same, a fifth wrong",
    "fashion-500-noise-30": "wrong labels, ten classes: clothes",
    "digits-30-noise-30": "wrong labels, ten classes: digits",
    "scripts": "underfitting: 100 writing systems",
    "fashion-5000": "clean data: 5,000 images of clothes",
}


def overview_accuracy() -> str:
    """The first page's table of gains: DCP beside the best rival, which is tuned for the data."""
    return tables.overview(RESULTS, OVERVIEW)


def _named(table: str) -> str:
    """Name the paper's settings by their values, which the records call a preset."""
    return table.replace("preset paper", "λ = 1, α = 0.6")


def gains_by_experiment(columns: Mapping[str, str]) -> str:
    """The gains over plain training in some experiments, by the head of their column."""
    return gain_tables.by_experiment({head: _records(name) for head, name in columns.items()}, evidence.CURVES)


def gains_by_size() -> str:
    """The gains over plain training by the size of the network, a column for each, and those of the primary two."""
    columns = {_parameters(name): [r for run in size.runs_of(name) for r in _records(run)] for name in size.NETWORKS}
    together = {
        f"both largest, {seeds} seeds": [_records(size.runs_of(name)[index]) for name in size.PRIMARY]
        for index, seeds in enumerate(("first", "new"))
    }
    return gain_tables.by_experiment(columns, size.DRAWN, together)


def gains_on_few_kanji(experiments: Mapping[str, str]) -> str:
    """The gains over plain training with few images of kanji, by the title of an experiment."""
    found = {title: _records(name) for title, name in experiments.items()}
    made = {record["label"] for some in found.values() for record in some}
    rows = {label: Row(label) for label in ("DCP", "label smoothing 0.1", "DCL") if label in made}
    return gain_tables.by_setting(found, rows)


def _parameters(name: str, setting: str = "scripts") -> str:
    """The head of a network's column."""
    return f"{size.parameters(setting, name) / 1000:,.0f} k parameters"


def gains_by_setting(*, bold: bool = False) -> str:
    """The gains over plain training in all settings, with corrected p values, or the small ones in bold."""
    table: str = gain_tables.by_setting(_settings(), pays.TESTED, bold=bold)
    return _with_short_names(table)


def _with_short_names(table: str) -> str:
    return table.replace(evidence.TITLES["kanji"], "kanji")


def _settings() -> dict[str, list[Any]]:
    """The records of all settings by their title, the largest gain of DCP first."""
    found = {title: _records(name) for name, title in pays.PAYS.items()}
    return {title: found[title] for title in by_gain(found, Row("DCP"))}


def gains_by_measure(name: str, *measures: str) -> str:
    """What each row of an experiment changes, a column for each measure."""
    rows = {label: Row(label) for label in EXPERIMENTS[name].runs if label != EXPERIMENTS[name].baseline}
    return by_measure(_records(name), rows, measures)


def planned_comparisons() -> str:
    """DCP's gains on a pretrained network in comparisons that were planned, with p corrected for all of them."""
    return fine_tuning.table(RESULTS)


def wrong_labels() -> str:
    """What to take with wrong labels: each method at its best learning rate."""
    return rows_with_wrong_labels.table(RESULTS)


def tables_of_numbers() -> str:
    """The gains over plain training on tables of two to ten classes."""
    return tabular.table(RESULTS)


def rivals(table: str) -> str:
    """One of the tables of ``python -m examples.research.rivals.tables``."""
    found: str = getattr(tables, table)(RESULTS)
    return found


def companion(table: str, *rounds: int) -> str:
    """One of the tables of ``python -m examples.research.rivals.companion_tables``, in the seeds of some rounds."""
    found: str = getattr(companion_tables, table)(RESULTS, *([rounds] if rounds else []))
    heads, rule, *lines = found.splitlines()
    has_figures = re.compile(r"[-+]\d")  # gains: rows that were not run are left out
    return "\n".join([heads, rule, *filter(has_figures.search, lines)])


def fractions() -> str:
    """What a share of the rows changes for model and companion."""
    return fraction.table(RESULTS)


def added_fractions() -> str:
    """The same in the settings of the second plan."""
    return _with_short_names(fraction.table(RESULTS, fraction.ADDED))


def rivals_in_new_seeds() -> str:
    """The table in new seeds without its last columns: the second best rival, and the number of seeds."""
    lines = [line.split(" | ") for line in tables.in_new_seeds(RESULTS).splitlines()]
    return "\n".join(" | ".join(line[: lines[0].index("second")]) + " |" for line in lines)


def _records(name: str) -> list[Any]:

    return records.read(RESULTS / f"{name}.jsonl")
