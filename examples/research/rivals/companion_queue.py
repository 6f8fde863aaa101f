"""The order of the runs of DCL's search; see :mod:`examples.research.rivals.companion`.

python -m examples.research.rivals.companion_queue --jobs 2        # all runs that have no record
python -m examples.research.rivals.companion_queue --list          # the stages, and how many runs of each are made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from examples.research.rivals import companion, queue, selection
from examples.research.rivals.experiments import name_of
from examples.research.rivals.settings import (
    CHOICE_ROUNDS,
    CHOSEN_ROUNDS,
    CONFIRMATION_ROUNDS,
    CONFIRMED,
    FAST,
    PLACES,
    SEARCHED,
)

# Where the companion is compared with the rivals of training with wrong labels, at their tuned values.
WRONG = ("digits-30-noise-30", "fashion-500-noise-30")
RIVALS = ("Mean Teacher", "ELR", "SCE")
LOGITS = "logit penalty"  # a control that is no row of DCL's own


def parts(folder: Path) -> Sequence[Callable[[], Iterator[queue.Item]]]:
    """The parts of the plan; what a part has depends on the results of those before it.

    The order of what follows the confirmation was changed to fit the time, before any of these runs: wrong labels of
    ten digits, their controls and the default that was decided come first; all pairs of the settings that the search
    left out come last. For the same reason the controls in new seeds, and the pairs with wrong labels of digits, were
    later moved before the controls of the other settings.
    """
    return (
        lambda: _pairs("search", SEARCHED),
        lambda: _confirmation(folder),
        lambda: _decided(folder, WRONG, CHOSEN_ROUNDS),
        lambda: _controls("controls with wrong labels of digits", WRONG[:1]),
        lambda: _chosen(folder, WRONG[:1], CHOSEN_ROUNDS[:2]),
        lambda: _rivals(folder, WRONG, RIVALS, CHOSEN_ROUNDS),
        lambda: _controls("controls", SEARCHED),
        lambda: _decided(folder, list(FAST), CHOSEN_ROUNDS[:2]),
        lambda: _rivals(folder, list(FAST), [LOGITS], CHOSEN_ROUNDS[:2]),
        lambda: _chosen(folder, list(FAST), CHOSEN_ROUNDS[:2]),
        lambda: _pairs("pairs with wrong labels of digits", WRONG[:1]),
        lambda: _chosen(folder, WRONG, CHOSEN_ROUNDS),
        lambda: _controls("controls, other settings", CONFIRMED),
        lambda: _pairs("other settings", CONFIRMED),
        lambda: _chosen(folder, list(FAST), CHOSEN_ROUNDS),
    )


def _items(stage: str, names: Sequence[str], labels: Sequence[str], rounds: Sequence[int]) -> Iterator[queue.Item]:
    for number_of_round in rounds:
        for label in labels:
            for name in names:
                for seed in PLACES[name].of_round(number_of_round):
                    yield queue.Item(f"{stage}, round {number_of_round}", companion.name_of(name), label, seed)


def _pairs(stage: str, names: Sequence[str]) -> Iterator[queue.Item]:
    yield from _items(stage, names, ["CE", *map(companion.pair_row, companion.PAIRS)], CHOICE_ROUNDS)


def _controls(stage: str, names: Sequence[str]) -> Iterator[queue.Item]:
    labels = ["CE", companion.AVERAGED, *(label for found in companion.CONTROLS.values() for label in found)]
    yield from _items(stage, names, labels, CHOICE_ROUNDS)


def candidates(folder: Path) -> list[companion.Pair]:
    """Winner and runner-up by the records of the search."""
    return companion.candidates(companion.judge(companion.searched(folder)))


def _confirmation(folder: Path) -> Iterator[queue.Item]:
    pairs = [companion.TODAY, *candidates(folder)]
    yield from _items("confirmation", CONFIRMED, ["CE", *map(companion.pair_row, pairs)], CONFIRMATION_ROUNDS)


def decided(folder: Path) -> list[companion.Pair]:
    """The default that follows from the confirmation, if it is another one than today's."""
    confirmed = {name: companion.of_place(folder, name, "test", "model", CONFIRMATION_ROUNDS) for name in CONFIRMED}
    pair = companion.default(confirmed, candidates(folder))
    return [] if pair == companion.TODAY else [pair]


def _decided(folder: Path, names: Sequence[str], rounds: Sequence[int]) -> Iterator[queue.Item]:
    labels = ["CE", *map(companion.pair_row, dict.fromkeys([*decided(folder), companion.TODAY]))]
    yield from _items("the default in new seeds", names, labels, rounds)


def _chosen(folder: Path, names: Sequence[str], rounds: Sequence[int]) -> Iterator[queue.Item]:
    pairs = [companion.pair_row(pair) for pair in (*candidates(folder), companion.TODAY)]
    for number_of_round in rounds:
        for name in names:
            labels = ["CE", companion.AVERAGED, *pairs, *companion.tuned(folder, name).values()]
            yield from _items("new seeds", [name], list(dict.fromkeys(labels)), [number_of_round])


def _rivals(folder: Path, names: Sequence[str], methods: Sequence[str], rounds: Sequence[int]) -> Iterator[queue.Item]:
    chosen = selection.choose(folder).by_place
    for name in names:
        for number_of_round in rounds:
            for seed in PLACES[name].of_round(number_of_round):
                for method in methods:
                    yield queue.Item("rivals at their tuned values", name_of(name), chosen[name][method], seed)


if __name__ == "__main__":
    queue.main(description=__doc__, parts=parts)
