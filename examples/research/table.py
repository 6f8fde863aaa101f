"""Results in a table: mean and standard error over the seeds, and the paired difference to the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from dcl_optim.trial.paired import mean_and_error, plus_minus, probability_cell
from dcl_optim.trial.paired import probability as probability_of
from examples.research.configuration import Experiment
from examples.research.records import Record

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


def paired(ours: dict[int, Record], theirs: dict[int, Record]) -> list[float]:
    """The differences in accuracy, seed by seed."""
    return by_seed(*({seed: accuracy(record) for seed, record in runs.items()} for runs in (ours, theirs)))


def by_seed(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """The differences of the common seeds."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def probability(differences: Sequence[float]) -> float | None:
    """The p of the paired t-test that differences are noise; None without a spread to compare their mean with."""
    if len(differences) < 2 or max(differences) - min(differences) < SAME:
        return None
    mean, error = mean_and_error(differences)
    assert error is not None
    return probability_of(mean, error, len(differences))


def _row(label: str, runs: dict[int, Record], baseline: dict[int, Record]) -> str:
    some = list(runs.values())
    first, *others = some[0]["accuracy"]
    mean, error = mean_and_error([accuracy(record) for record in some])
    differences = [] if runs is baseline else paired(runs, baseline)
    difference = plus_minus(*mean_and_error(differences), sign="+") if differences else ""
    more = ", ".join(
        f"{name} {statistics.fmean(100 * record['accuracy'][name] for record in some):.2f}" for name in others
    )
    seconds = statistics.median(record["seconds"] for record in some)
    cells = (
        label,
        plus_minus(mean, error),
        difference,
        probability_cell(probability(differences)),
        more,
        _mean(some, "consistency", first, 3),
        _mean(some, "perplexity", first, 2),
    )
    return "| " + " | ".join((*cells, f"{seconds:.0f}", str(len(some)))) + " |"


def _mean(some: Sequence[Record], key: str, predictor: str, places: int) -> str:
    """The mean of a measure; nothing for records of accuracies alone."""
    if key not in some[0]:
        return ""
    return f"{statistics.fmean(record[key][predictor] for record in some):.{places}f}"
