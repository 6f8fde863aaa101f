"""What the tables of the rivals and of DCL's search have in common: names of settings, and gains.

A gain is in points of accuracy, over plain training with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def cell_of(gains: Sequence[float], places: int = 2) -> str:
    """Their mean with its standard error; without the error if there is one seed, and nothing without any."""
    if len(gains) < 2:
        return f"{gains[0]:+.1f}" if gains else ""
    return plus_minus(*mean_and_error(gains), sign="+", places=places)


def gain_of(scores: choice.Scores, label: str, places: int = 2) -> str:
    """A row's mean gain over CE."""
    return cell_of(choice.gains(scores, label), places)
