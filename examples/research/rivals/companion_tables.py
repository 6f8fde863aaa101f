"""The tables of DCL's controls and of the network to keep: :mod:`examples.research.rivals.companion`.

    python -m examples.research.rivals.companion_tables               # all of them, from the records that there are
    python -m examples.research.rivals.companion_tables --rounds 0 1  # in the seeds of the choice in place of new ones

Gains are over plain training (CE) with the same seed, on test images, of chosen rows only. What was not run has an
empty cell.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import grid
from examples.research import records
from examples.research.rivals import choice, companion, selection
from examples.research.rivals.cells import HEADS, cell_of, gain_of
from examples.research.rivals.companion import AVERAGED, CONTROLS, DEFAULT, KEPT, PREDICTORS, pair_row
from examples.research.rivals.experiments import name_of
from examples.research.rivals.settings import CHOICE_ROUNDS, CHOSEN_ROUNDS, FAST
from examples.research.table import by_seed

Rounds = tuple[int, ...]

# Where the companion is compared with the rivals of training with wrong labels, at their tuned values.
WRONG = ("digits-30-noise-30", "fashion-500-noise-30")
RIVALS = ("Mean Teacher", "ELR", "SCE")
LOGITS = "logit penalty"  # a control that is no row of DCL's own
AVERAGES = "averages of the weights"  # of plain training, a control that is no row of DCL's own
NAMES = (*CONTROLS, AVERAGES, LOGITS)
OF_CHOICE = "seeds of the choice"  # what marks a gain that was not measured in the seeds of the table
NETWORKS = [predictor for predictor in PREDICTORS if predictor != KEPT]


# ---- the network to keep ---------------------------------------------------------------------------------------------


def predictors(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """What the model, its companion, the mean of both and the one that is kept gain with the default."""
    row = pair_row(DEFAULT)
    lines = []
    for place in FAST:
        test = {one: companion.of_place(folder, place, "test", one, rounds) for one in PREDICTORS}
        gains = [gain_of(test[one], row, places=1) for one in PREDICTORS]
        lines.append([HEADS[place], *gains, _seeds(test["model"], row)])
    return "\n".join(grid(["", *PREDICTORS, "seeds"], lines, words=1))


# ---- the controls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """A control with its best value in a setting.

    Attributes:
        label: the row of its value.
        chosen_by: its mean gain on validation images in the seeds of the choice.
        scores: accuracies of its experiment on test images, of the network that is kept.
        rounds: whose seeds these are.
    """

    label: str
    chosen_by: float
    scores: choice.Scores
    rounds: Rounds


def controls(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """What the controls gain and what DCL's best pair gains, in the network that is kept, and what of it is left.

    The best control is the one with the largest gain on validation images. DCL's best pair minus this control is
    paired by the seed; where the pairs were not run it is the default. Settings without either are left out. A logit
    penalty that was not run in these seeds has those of the choice, and does not count in the last line.
    """
    chosen = selection.choose(folder)
    left: list[float] = []
    lines = []
    for place in FAST:
        found = _controls(folder, place, chosen.by_place[place].get(LOGITS), rounds)
        pair = companion.tuned(folder, place).get("DCL", pair_row(DEFAULT))
        test = companion.of_place(folder, place, "test", KEPT, rounds)
        if not choice.gains(test, pair):
            continue
        cells = [_gain_of_control(found.get(control), rounds) for control in NAMES]
        cells.append(gain_of(test, pair, places=1))
        best = max(found, key=lambda control: found[control].chosen_by, default="")
        differences = _minus(folder, place, pair, found[best]) if best else []
        if best and found[best].rounds == rounds:
            left += differences
        difference = _marked(cell_of(differences, places=1), found.get(best), rounds)
        lines.append([HEADS[place], *cells, best, difference, _seeds(test, pair)])
    lines.append(["all", *[""] * (len(NAMES) + 2), cell_of(left), str(len(left))])
    heads = [*NAMES, "DCL, best pair", "best control", "DCL minus it", "seeds"]
    return "\n".join(grid(["", *heads], lines, words=1))


def _minus(folder: Path, place: str, pair: str, control: Control) -> list[float]:
    """The accuracies of DCL's pair minus those of a control, seed by seed."""
    ours = companion.of_place(folder, place, "test", KEPT, control.rounds)
    return by_seed(ours.get(pair, {}), control.scores.get(control.label, {}))


def _controls(folder: Path, place: str, penalty: str | None, rounds: Rounds) -> dict[str, Control]:
    """The controls that were run in the seeds of the choice, by their name."""
    validation = companion.of_place(folder, place, "validation", KEPT)
    test = companion.of_place(folder, place, "test", KEPT, rounds)
    labels = {name: label for name, label in companion.tuned(folder, place).items() if name in CONTROLS}
    found = {}
    for name, label in (labels | {AVERAGES: AVERAGED}).items():
        gain = choice.mean_gain(validation, label)
        if gain is not None:
            found[name] = Control(label, gain, test, rounds)
    if penalty is not None:
        validation = selection.of_place(folder, name_of(place), place, "validation", CHOICE_ROUNDS)
        test = selection.of_place(folder, name_of(place), place, "test", rounds)
        if penalty not in test:
            rounds = CHOICE_ROUNDS
            test = selection.of_place(folder, name_of(place), place, "test", rounds)
        gain = choice.mean_gain(validation, penalty)
        if gain is not None:
            found[LOGITS] = Control(penalty, gain, test, rounds)
    return found


def _gain_of_control(control: Control | None, rounds: Rounds) -> str:
    return "" if control is None else _marked(gain_of(control.scores, control.label, places=1), control, rounds)


def _marked(cell: str, control: Control | None, rounds: Rounds) -> str:
    is_marked = cell and control is not None and control.rounds != rounds
    return f"{cell} ({OF_CHOICE})" if is_marked else cell


# ---- wrong labels of ten classes -------------------------------------------------------------------------------------


def wrong_labels(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """DCL's default beside the rivals of training with wrong labels, at their tuned values."""
    chosen = selection.choose(folder).by_place
    lines = []
    for predictor in PREDICTORS:
        scores = {place: companion.of_place(folder, place, "test", predictor, rounds) for place in WRONG}
        lines.append([f"DCL, {predictor}", *_in_wrong(scores, dict.fromkeys(WRONG, pair_row(DEFAULT)), None)])
    scores = {place: selection.of_place(folder, name_of(place), place, "test", rounds) for place in WRONG}
    for method in RIVALS:
        row = {place: chosen[place].get(method, "") for place in WRONG}
        lines.append([f"{method}, tuned", *_in_wrong(scores, row, method)])
    heads = [head for place in WRONG for head in (HEADS[place], "seeds")]
    return "\n".join(grid(["", *heads], lines, words=1))


def _in_wrong(scores: choice.AllScores, row: Mapping[str, str], method: str | None) -> list[str]:
    """The gain of a row in each setting, with its value unless the method is None, and the seeds."""
    cells = []
    for place, label in row.items():
        gain = gain_of(scores[place], label, places=1)
        cells += [gain if method is None else _with_value(gain, label, method), _seeds(scores[place], label)]
    return cells


def variants(folder: Path) -> str:
    """DCL with other networks and with AdamW on digits with wrong labels: gains over plain training in the same way."""
    found = records.finished(folder, f"{companion.VARIANTS}.jsonl")
    seeds = {record["seed"] for record in found}
    test = {network: companion.scores(found, "test", network, seeds) for network in NETWORKS}
    lines = []
    for row in companion.EXPERIMENTS[companion.VARIANTS].runs:
        title, _, method = row.partition(": ")
        plain = f"{title}: CE"
        if row == plain or row not in test["model"]:
            continue
        gains = [choice.gains(scores, row, plain) for scores in test.values()]
        accuracy = statistics.fmean(test["model"][plain][seed] for seed in test["model"][row])
        cells = [cell_of(one, places=1) for one in gains]
        lines.append([title + method.removeprefix("DCL"), f"{accuracy:.1f}", *cells, str(len(gains[0]))])
    return "\n".join(grid(["", "plain, %", *NETWORKS, "seeds"], lines, words=1))


# ---- parts of the tables ---------------------------------------------------------------------------------------------


def _short(label: str, method: str = "DCL,") -> str:
    return label.removeprefix(method).strip()


def _with_value(cell: str, label: str, method: str = "DCL,") -> str:
    """A gain with the value of its row; nothing if there is none."""
    return f"{cell} ({_short(label, method)})" if cell else ""


def _seeds(scores: choice.Scores, row: str) -> str:
    """How many seeds a row has."""
    return str(len(choice.gains(scores, row)) or "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the records")
    parser.add_argument("--rounds", type=int, nargs="+", default=CHOSEN_ROUNDS, help="whose seeds are shown")
    options = parser.parse_args(arguments)
    folder = options.results
    rounds = tuple(options.rounds)
    print(f"The three networks and the kept one, on test images\n\n{predictors(folder, rounds)}")
    print(f"\nThe controls, in the network that is kept\n\n{controls(folder, rounds)}")
    print(f"\nOther networks, and AdamW\n\n{variants(folder)}")
    print(f"\nWrong labels of ten classes\n\n{wrong_labels(folder, rounds)}")


if __name__ == "__main__":
    main()
