"""What is chosen from the records of all settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.research import records
from examples.research.rivals import choice, values
from examples.research.rivals.experiments import name_of
from examples.research.rivals.settings import CHOICE_ROUNDS, FAST, PLACES

BEST = 2  # rivals that are run in new seeds: over all settings, in each setting, and with DCP on top


@dataclass(frozen=True)
class Chosen:
    """The chosen rows.

    Attributes:
        for_one: (a), by the method.
        by_place: (b), by the setting and the method; tuned plain training is the method "CE".
        ahead: the best rivals of (a).
        ahead_in: the best rivals of (b), by the setting.
        under: the rows that DCP is added to, by the setting; tuned plain training comes first.
    """

    for_one: Mapping[str, str]
    by_place: Mapping[str, Mapping[str, str]]
    ahead: tuple[str, ...]
    ahead_in: Mapping[str, tuple[str, ...]]
    under: Mapping[str, tuple[str, ...]]

    def for_all(self) -> list[str]:
        """CE, DCP's default and the best rivals of (a)."""
        return ["CE", *values.LABELS["DCP"], *self.ahead]

    def labels(self, place: str) -> list[str]:
        """The rows of a setting that are run in new seeds, CE first."""
        return list(dict.fromkeys([*self.for_all(), *self.ahead_in[place], *self.under[place]]))


def validation(folder: Path, rounds: tuple[int, ...] = CHOICE_ROUNDS) -> dict[str, dict[str, dict[int, float]]]:
    """The validation accuracies of the fast settings in the seeds of the choice."""
    return {name: of_place(folder, name_of(name), name, "validation", rounds) for name in FAST}


def of_place(
    folder: Path, experiment: str, place: str, part: str, rounds: tuple[int, ...]
) -> dict[str, dict[int, float]]:
    """The accuracies of an experiment in a setting, in the seeds of some rounds."""
    seeds = {seed for one in rounds for seed in PLACES[place].of_round(one)}
    return choice.scores(records.finished(folder, f"{experiment}.jsonl"), part, seeds)


def choose(folder: Path) -> Chosen:
    """Choose from the records in a folder and in the repository; a method without a run is left out."""
    return of_scores(validation(folder))


def of_scores(settings: choice.AllScores) -> Chosen:
    """Choose from validation accuracies by the setting, the row and the seed."""
    for_one = {method: choice.one_value(settings, labels) for method, labels in values.LABELS.items()}
    known = {method: label for method, label in for_one.items() if label is not None}
    by_place: dict[str, dict[str, str]] = {}
    ahead_in: dict[str, tuple[str, ...]] = {}
    under: dict[str, tuple[str, ...]] = {}
    for name, setting in settings.items():
        found = {method: choice.tuned(setting, labels) for method, labels in values.LABELS.items()}
        found["CE"] = plain = _tuned_plain(setting)
        by_place[name] = {method: label for method, label in found.items() if label is not None}
        ranked = choice.ranked(setting, rivals(by_place[name]))
        ahead_in[name] = tuple(ranked[:BEST])
        runs = values.rows(PLACES[name].plain)
        steps = [label for label in ranked if values.can_have_dcp(runs[label])]
        under[name] = (plain, *steps[:BEST])
    ahead = choice.ranked_over_settings(settings, rivals(known))[:BEST]
    return Chosen(known, by_place, tuple(ahead), ahead_in, under)


def _tuned_plain(setting: choice.Scores) -> str:
    """CE with the learning rate and weight decay that gain most, if they gain; CE has the second round anyway."""
    best = choice.tuned(setting, [label for label in values.PLAIN if label != "CE"])
    gain = None if best is None else choice.mean_gain(setting, best)
    return "CE" if gain is None or gain <= 0 else best


def rivals(labels: Mapping[str, str]) -> list[str]:
    """The rows of methods that a user may pick in place of DCP; DCL is not one, and tuned plain training has a row."""
    own = ("CE", "CE, twice the epochs", "weight decay", "DCP", "DCL")
    return [label for method, label in labels.items() if method not in own]
