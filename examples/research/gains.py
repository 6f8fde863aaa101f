"""What a row of an experiment gains over its baseline, seed by seed, and which gains are more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dcl_optim.trial.paired import mean_and_error
from examples.research.records import Record
from examples.research.table import by_label, by_seed, probability

Measure = Callable[[Record, str], float]

# By the name that a table gives them; each of a record and the name of one of its predictors.
MEASURES: dict[str, Measure] = {
    "accuracy, %": lambda record, name: 100 * record["accuracy"][name],
    "NLL": lambda record, name: record["quality"][name]["nll"],
    "NLL, scaled": lambda record, name: record["quality"][name]["nll_scaled"],
    "ECE, %": lambda record, name: 100 * record["quality"][name]["ece"],
    "ECE, scaled, %": lambda record, name: 100 * record["quality"][name]["ece_scaled"],
    "train accuracy, %": lambda record, name: 100 * record["train_accuracy"][name],
}


@dataclass(frozen=True)
class Row:
    """One row of a table: whose records, and which of their predictors; "model" is what the optimizer trained."""

    label: str
    predictor: str = "model"


CE = Row("CE")


def values(records: Sequence[Record], row: Row, measure: str) -> dict[int, float]:
    """A measure by the seed."""
    return {
        seed: MEASURES[measure](record, row.predictor) for seed, record in by_label(records).get(row.label, {}).items()
    }


@dataclass(frozen=True)
class Gain:
    """Paired differences to the baseline: their mean, its standard error, the paired t-test's p and their number."""

    mean: float
    error: float | None
    p: float | None
    pairs: int


def gain(records: Sequence[Record], row: Row, baseline: Row, measure: str = "accuracy, %") -> Gain | None:
    """Compare two rows on their common seeds; None without any."""
    return gain_in_all([records], row, baseline, measure)


def gain_in_all(
    experiments: Sequence[Sequence[Record]], row: Row, baseline: Row, measure: str = "accuracy, %"
) -> Gain | None:
    """Compare two rows on the common seeds of each of several experiments, all pairs together; None without any."""
    differences = [
        difference
        for records in experiments
        for difference in by_seed(values(records, row, measure), values(records, baseline, measure))
    ]
    if not differences:
        return None
    return Gain(*mean_and_error(differences), probability(differences), len(differences))


def by_gain(settings: Mapping[str, Sequence[Record]], row: Row) -> list[str]:
    """Sort the names of settings by what a row gains over CE, the largest gain first; those without one come last."""
    gains = {name: gain(found, row, CE) for name, found in settings.items()}
    return sorted(settings, key=lambda name: -one.mean if (one := gains[name]) else math.inf)
