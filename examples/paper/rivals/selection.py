"""What is chosen from the records of all settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.paper import records
from examples.paper.rivals import choice, rules, values
from examples.paper.rivals.experiments import name_of, search_of
from examples.paper.rivals.settings import CHOICE_ROUNDS, FAST, PLACES, SEARCHED

BEST = 2  # rivals of a setting that DCP is added to


@dataclass(frozen=True)
class Chosen:
    """The chosen rows.

    Attributes:
        for_one: (a), by the method.
        by_place: (b), by the setting and the method; tuned plain training is the method "CE".
        best: the rivals that DCP is added to, by the setting; tuned plain training comes first.
    """

    for_one: Mapping[str, str]
    by_place: Mapping[str, Mapping[str, str]]
    best: Mapping[str, tuple[str, ...]]

    def for_all(self) -> list[str]:
        """The rows of (a), CE first."""
        return list(dict.fromkeys(["CE", *self.for_one.values()]))

    def labels(self, place: str) -> list[str]:
        """All chosen rows of a setting, CE first."""
        return list(dict.fromkeys([*self.for_all(), *self.by_place[place].values(), *self.best[place]]))

    def under(self, place: str) -> tuple[str, ...]:
        """The rows of a setting that DCP is added to."""
        return self.best[place]


def validation(folder: Path, rounds: tuple[int, ...] = CHOICE_ROUNDS) -> dict[str, dict[str, dict[int, float]]]:
    """The validation accuracies of the fast settings in the seeds of the choice."""
    return {name: of_place(folder, name_of(name), name, "validation", rounds) for name in FAST}


def searched(folder: Path, rounds: tuple[int, ...] = CHOICE_ROUNDS) -> dict[str, dict[str, dict[int, float]]]:
    """The same of the search for the default, where today's default may be known from the other experiment alone."""
    found = {}
    (default,) = values.LABELS["DCP"]
    for name in SEARCHED:
        scores = of_place(folder, search_of(name), name, "validation", rounds)
        known = of_place(folder, name_of(name), name, "validation", rounds).get(default)
        if known is not None:
            scores.setdefault(rules.TODAY.row(PLACES[name].classes), known)
        found[name] = scores
    return found


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
    by_place: dict[str, dict[str, str]] = {}
    best: dict[str, tuple[str, ...]] = {}
    for name, setting in settings.items():
        found = {method: choice.tuned(setting, labels) for method, labels in values.LABELS.items()}
        found["CE"] = choice.tuned(setting, values.PLAIN)
        by_place[name] = {method: label for method, label in found.items() if label is not None}
        best[name] = _best(setting, by_place[name], values.rows(PLACES[name].plain))
    return Chosen({method: label for method, label in for_one.items() if label is not None}, by_place, best)


def _best(
    setting: choice.Scores, labels: Mapping[str, str], runs: Mapping[str, values.Configuration]
) -> tuple[str, ...]:
    """Tuned plain training and the best rivals that are one training step."""
    plain = labels.get("CE")
    rivals = [label for method, label in labels.items() if method not in ("CE", "DCP", "weight decay")]
    steps = [label for label in rivals if values.can_have_dcp(runs[label]) and label != "CE, twice the epochs"]
    ranked = sorted(steps, key=lambda label: -(choice.mean_gain(setting, label) or 0.0))
    return tuple(label for label in [plain, *ranked[:BEST]] if label is not None)
