"""Which values are chosen, by validation accuracy alone; see :mod:`examples.research.rivals` for the rules."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from examples.research.records import Record
from examples.research.table import by_seed

# Accuracies in per cent by their row and their seed, of one setting; and those by the setting.
Scores = Mapping[str, Mapping[int, float]]
AllScores = Mapping[str, Scores]


def scores(records: Sequence[Record], part: str, seeds: Collection[int] | None = None) -> dict[str, dict[int, float]]:
    """The accuracies of records that have both parts, in per cent, by row and seed.

    Args:
        records: of one setting.
        part: "validation" or "test".
        seeds: those to take; None: all.

    Raises:
        ValueError: another part.
    """
    keys = {"validation": "validation_accuracy", "test": "accuracy"}
    if part not in keys:
        raise ValueError(f"part={part!r} must be one of {', '.join(keys)}")
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if seeds is None or record["seed"] in seeds:
            deployed = next(iter(record[keys[part]].values()))
            found.setdefault(record["label"], {})[record["seed"]] = 100 * float(deployed)
    return found


def gains(setting: Scores, row: str, baseline: str = "CE") -> list[float]:
    """What a row gains over another one, seed by seed."""
    return by_seed(setting.get(row, {}), setting.get(baseline, {}))


def mean_gain(setting: Scores, row: str, baseline: str = "CE") -> float | None:
    """The mean of the gains; None without a common seed."""
    found = gains(setting, row, baseline)
    return statistics.fmean(found) if found else None


def mean_over_settings(settings: AllScores, row: str) -> float | None:
    """The mean over the settings of a row's mean gain; None if it was not run in one of them."""
    found = [mean_gain(setting, row) for setting in settings.values()]
    known = [gain for gain in found if gain is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def ranked_over_settings(settings: AllScores, rows: Sequence[str]) -> list[str]:
    """Rows that were run in all settings, the largest mean gain first; those with more seeds come before the others.

    A mean of one seed is not compared with one of two: rows that had the second round were ahead in the first.
    """
    found = []
    for row in rows:
        mean = mean_over_settings(settings, row)
        if mean is not None:
            rounds = min(len(gains(setting, row)) for setting in settings.values())
            found.append((rounds, mean, row))
    return [row for _, _, row in sorted(found, key=lambda one: (-one[0], -one[1]))]


def ranked(setting: Scores, rows: Sequence[str]) -> list[str]:
    """The same in one setting."""
    return ranked_over_settings({"": setting}, rows)


def one_value(settings: AllScores, rows: Sequence[str]) -> str | None:
    """The first of the rows over all settings; None while no row was run in all of them."""
    return next(iter(ranked_over_settings(settings, rows)), None)


def tuned(setting: Scores, rows: Sequence[str]) -> str | None:
    """The first of the rows in one setting; None while no row was run there."""
    return next(iter(ranked(setting, rows)), None)
