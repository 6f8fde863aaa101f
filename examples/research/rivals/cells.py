"""What the tables of the rivals and of DCL's search have in common: names of settings, gains, candidates for a default.

A gain is in points of accuracy, over plain training with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.table import grid
from dcl_optim.trial.paired import mean_and_error, plus_minus
from examples.research.rivals import choice

HEADS = {
    "kanji-3": "kanji, 3",
    "kanji-5": "kanji, 5",
    "kanji-5-noise-20": "kanji, 5, 20 % wrong",
    "kanji-5-noise-40": "kanji, 5, 40 % wrong",
    "kanji-32": "kanji, 32",
    "scripts": "scripts",
    "text": "text",
    "digits-5": "digits, 5",
    "digits-30-noise-30": "digits, 30, 30 % wrong",
    "fashion-500-noise-30": "Fashion, 50, 30 % wrong",
    "fashion-5000": "Fashion, 500",
}

RowOf = Callable[[str], str]  # the name of a row in a setting


def cell_of(gains: Sequence[float], places: int = 2) -> str:
    """Their mean with its standard error; without the error if there is one seed, and nothing without any."""
    if len(gains) < 2:
        return f"{gains[0]:+.1f}" if gains else ""
    return plus_minus(*mean_and_error(gains), sign="+", places=places)


def gain_of(scores: choice.Scores, label: str, places: int = 2) -> str:
    """A row's mean gain over CE."""
    return cell_of(choice.gains(scores, label), places)


def against_today(settings: choice.AllScores, today: RowOf, candidates: Mapping[str, RowOf]) -> str:
    """The gains of today's default and of candidates for it, and their differences by the setting and over all seeds.

    Args:
        settings: accuracies by the setting, the row and the seed.
        today: gives the row of today's default in a setting.
        candidates: the same of each candidate, by its name in the table.
    """
    lines = []
    differences: dict[str, list[float]] = {candidate: [] for candidate in candidates}
    for name, setting in settings.items():
        cells = [gain_of(setting, today(name))]
        for candidate, row_of in candidates.items():
            found = choice.gains(setting, row_of(name), today(name))
            differences[candidate] += found
            cells += [gain_of(setting, row_of(name)), cell_of(found)]
        lines.append([HEADS[name], *cells, str(len(setting.get(today(name), {})))])
    total = ["all", ""]
    for found in differences.values():
        total += ["", cell_of(found)]
    lines.append([*total, str(max(map(len, differences.values()), default=0))])
    heads = [head for candidate in candidates for head in (candidate, "minus today's")]
    return "\n".join(grid(["", "today", *heads, "seeds"], lines, words=1))
