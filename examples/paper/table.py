"""Results in a table: mean and standard error over the seeds, and the paired difference to the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dcl_optim.report import mean_and_error
from examples.paper.configuration import Experiment
from examples.paper.records import Record

SAME = 1e-9  # points that rounding makes of equal differences
HEADER = "| | accuracy, % | minus {baseline} | p | other predictors, % | consistency | perplexity | seconds | seeds |"


def markdown(experiment: Experiment, records: Sequence[Record]) -> str:
    """The table of an experiment, a row for each of its labels that has a finished run."""
    found = by_label(records)
    lines = [HEADER.format(baseline=experiment.baseline), "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    baseline = found.get(experiment.baseline, {})
    lines += [_row(label, found[label], baseline) for label in experiment.runs if label in found]
    return "\n".join(lines)


def by_label(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """The records by their label and their seed."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        found.setdefault(record["label"], {})[record["seed"]] = record
    return found


def accuracy(record: Record) -> float:
    """What the method deploys, in per cent."""
    return 100 * float(next(iter(record["accuracy"].values())))


def paired(ours: dict[int, Record], theirs: dict[int, Record]) -> tuple[list[float], float]:
    """The differences in accuracy, seed by seed, and the p of the paired t-test that they are noise."""
    differences = [accuracy(ours[seed]) - accuracy(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return differences, _p(differences)


def _p(differences: Sequence[float]) -> float:
    if len(differences) < 2 or max(differences) - min(differences) < SAME:  # no spread to compare the mean with
        return math.nan
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def _row(label: str, runs: dict[int, Record], baseline: dict[int, Record]) -> str:
    some = list(runs.values())
    first, *others = some[0]["accuracy"]
    mean, error = mean_and_error([accuracy(record) for record in some])
    difference, p = "", ""
    differences, probability = paired(runs, baseline)
    if differences and runs is not baseline:
        difference, p = _plus_minus(*mean_and_error(differences), sign="+"), _number(probability, ".3f")
    more = ", ".join(
        f"{name} {statistics.fmean(100 * record['accuracy'][name] for record in some):.2f}" for name in others
    )
    consistency, perplexity = (
        statistics.fmean(record[key][first] for record in some) for key in ("consistency", "perplexity")
    )
    seconds = statistics.median(record["seconds"] for record in some)
    cells = (label, _plus_minus(mean, error), difference, p, more, f"{consistency:.3f}", f"{perplexity:.2f}")
    return "| " + " | ".join((*cells, f"{seconds:.0f}", str(len(some)))) + " |"


def _plus_minus(mean: float, error: float | None, sign: str = "") -> str:
    return f"{mean:{sign}.2f}" + ("" if error is None else f" ± {error:.2f}")


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
