"""Which values are chosen, by validation accuracy alone; see :mod:`examples.research.rivals` for the rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from examples.research.records import Record
from examples.research.rivals.rules import REFERENCES, Rule, fixed_row
from examples.research.table import by_seed

WORST = -0.3  # points below CE that a rule may lose in a setting

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


def regret(setting: Scores, row: str) -> float | None:
    """The mean accuracy of the best fixed pair minus that of a row, on their common seeds with CE.

    None if the row or no pair was run.
    """
    own = mean_gain(setting, row)
    references = [mean_gain(setting, fixed_row(weight, alpha)) for weight, alpha in REFERENCES]
    known = [gain for gain in references if gain is not None]
    return None if own is None or not known else max(known) - own


@dataclass(frozen=True)
class Judged:
    """What the search finds of a rule: its gain over CE and its regret in each setting, by the setting's name."""

    rule: Rule
    gains: Mapping[str, float]
    regrets: Mapping[str, float]

    @property
    def mean_regret(self) -> float:
        """The mean over the settings."""
        return statistics.fmean(self.regrets.values())

    @property
    def is_allowed(self) -> bool:
        """Whether it is nowhere more than the limit below CE."""
        return min(self.gains.values()) >= WORST


def judge(settings: AllScores, classes: Mapping[str, int], rules: Sequence[Rule]) -> list[Judged]:
    """Judge the rules that were run in all settings, the smallest mean regret first."""
    found = []
    for rule in rules:
        own: dict[str, float] = {}
        regrets: dict[str, float] = {}
        for name, setting in settings.items():
            row = rule.row(classes[name])
            gain, lost = mean_gain(setting, row), regret(setting, row)
            if gain is not None and lost is not None:
                own[name] = gain
                regrets[name] = lost
        if settings and len(own) == len(settings):
            found.append(Judged(rule, own, regrets))
    return sorted(found, key=lambda judged: judged.mean_regret)


def differences(settings: AllScores, classes: Mapping[str, int], ours: Rule, theirs: Rule) -> list[float]:
    """The accuracy of one rule minus that of another, over all settings and seeds."""
    return [
        difference
        for name, setting in settings.items()
        for difference in gains(setting, ours.row(classes[name]), theirs.row(classes[name]))
    ]


def candidate(settings: AllScores, classes: Mapping[str, int], judged: Sequence[Judged]) -> Rule | None:
    """The rule that the search ends with, see :mod:`examples.research.rivals`; None without one that is allowed."""
    allowed = [one.rule for one in judged if one.is_allowed]
    if not allowed:
        return None
    best = allowed[0]
    simple = next((rule for rule in allowed if rule.power is None), None)
    if simple is None or simple == best:
        return best
    lost = differences(settings, classes, best, simple)
    error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
    return simple if statistics.fmean(lost) <= error else best
