"""The experiments: of each setting one for the methods, and one for DCP on top of them."""

from __future__ import annotations

from examples.research.configuration import Experiment
from examples.research.rivals import companion, values
from examples.research.rivals.settings import CHOICE_ROUNDS, FAST, PLACES


def name_of(place: str) -> str:
    """The experiment with all methods in a setting."""
    return f"rivals-{place}"


def top_of(place: str) -> str:
    """The experiment with DCP on top of the others in a setting."""
    return f"rivals-on-top-{place}"


def _experiments() -> dict[str, Experiment]:
    found = {}
    for name, place in PLACES.items():
        seeds = len(CHOICE_ROUNDS) * place.seeds
        found[name_of(name)] = Experiment(
            f"DCP and its rivals: {place.title}", "both", seeds, "CE", values.rows(place.plain)
        )
        if name in FAST:
            title = f"DCP on top of its rivals: {place.title}"
            found[top_of(name)] = Experiment(title, "both", seeds, "CE", values.on_top(place.plain))
    return found | companion.EXPERIMENTS


EXPERIMENTS = _experiments()
