"""What to take with wrong labels: each method at three learning rates, the best of which validation images choose.

The seeds are new ones: none of them chose a value of a method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.table import grid
from dcl_optim.trial.paired import mean_and_error, plus_minus
from examples.research import records
from examples.research.configuration import DCP, Configuration, Experiment
from examples.research.records import Record
from examples.research.rivals.settings import FAST

SMOOTHED: dict[str, Any] = {"label_smoothing": 0.3}
WEIGHT_1: dict[str, Any] = DCP | {"weight": 1.0}
DCL: dict[str, Any] = {"weight": 0.1, "alpha": 0.99, "distance": "mse"}
# The method and its options, by the name of the row.
METHODS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("plain", {}),
    "label smoothing 0.3": ("plain", SMOOTHED),
    "DCP": ("dcp", DCP),
    "DCP, weight=1": ("dcp", WEIGHT_1),
    "DCP, weight=1, and label smoothing 0.3": ("dcp", WEIGHT_1 | SMOOTHED),
    "DCL": ("dcl", DCL),
    "Mean Teacher 100": ("mean-teacher-by-line", {"weight": 100.0}),
    "Mean Teacher 10": ("mean-teacher-by-line", {"weight": 10.0}),
}
RATES = (1.0, 1 / 3, 0.1)  # times the setting's learning rate
DIGITS = FAST["digits-30-noise-30"].plain
SEEDS = 5
SHORT = replace(DIGITS, network="cnn-without-norm", epochs=30, batch_size=25)
CLOTHES = FAST["fashion-500-noise-30"].plain
# By the experiment: what a table calls it, and plain training.
SETTINGS: dict[str, tuple[str, Configuration]] = {
    "wrong-labels-digits": ("digits, long", DIGITS),
    "wrong-labels-digits-short": ("digits, short", SHORT),
    "wrong-labels-clothes": ("clothes", CLOTHES),
}
FIRST_SEED = 100


def label_of(method: str, rate: float) -> str:
    """The row of a method at a learning rate."""
    return f"{method}, lr × {rate:.2g}"


def _runs(plain: Configuration) -> dict[str, Configuration]:
    return {
        label_of(name, rate): replace(plain, method=method, options=options, lr=rate * plain.lr)
        for rate in RATES
        for name, (method, options) in METHODS.items()
    }


EXPERIMENTS: dict[str, Experiment] = {
    name: Experiment(
        f"what to take with wrong labels: {title}",
        "both",
        SEEDS,
        label_of("plain", 1.0),
        _runs(plain),
        FIRST_SEED,
    )
    for name, (title, plain) in SETTINGS.items()
}


# ---- the table -------------------------------------------------------------------------------------------------------

# What is deployed: the first predictor of a method, and of DCL both networks.
ROWS: tuple[tuple[str, str, str], ...] = (
    *((name, name, "") for name in METHODS if name not in ("plain", "DCL")),
    ("DCL, the model", "DCL", "model"),
    ("DCL, its companion", "DCL", "companion"),
)
Scores = dict[int, tuple[float, float]]  # by the seed: accuracy on validation and test images, percent


def table(folder: Path) -> str:
    """The gains over tuned plain training, each method at its best learning rate by validation images."""
    columns = {title: _column(records.read(folder / f"{name}.jsonl")) for name, (title, _) in SETTINGS.items()}
    names = ["plain, %", *(name for name, _, _ in ROWS), "learning rate of plain"]
    lines = [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    return "\n".join(grid(["", *columns], lines, words=1))


def _column(made: Sequence[Record]) -> dict[str, str]:
    plain, rate, seeds = _tuned(made, "plain", "")
    if not plain:
        return {}
    mean, error = mean_and_error([test for _, test in plain.values()])
    cells = {"plain, %": plus_minus(mean, error, places=1), "learning rate of plain": f"× {rate:.2g}"}
    for name, method, predictor in ROWS:
        scores, _, found = _tuned(made, method, predictor)
        if found == seeds:
            gains = [scores[seed][1] - plain[seed][1] for seed in seeds]
            cells[name] = plus_minus(*mean_and_error(gains), sign="+", places=1)
    return cells


def _tuned(made: Sequence[Record], method: str, predictor: str) -> tuple[Scores, float, list[int]]:
    """The scores at the learning rate that is best on validation images, among those with all seeds of the first."""
    found = {rate: _scores(made, label_of(method, rate), predictor) for rate in RATES}
    seeds = sorted(found[RATES[0]])
    whole = [rate for rate in RATES if sorted(found[rate]) == seeds]
    best = max(whole, key=lambda rate: sum(validation for validation, _ in found[rate].values()))
    return found[best], best, seeds


def _scores(made: Sequence[Record], label: str, predictor: str) -> Scores:
    found = {}
    for record in made:
        if record["label"] == label:
            name = predictor or next(iter(record["accuracy"]))
            found[record["seed"]] = 100 * record["validation_accuracy"][name], 100 * record["accuracy"][name]
    return found
