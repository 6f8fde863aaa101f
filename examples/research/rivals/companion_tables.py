"""The tables of DCL's search, of its controls and of the network to keep: :mod:`examples.research.rivals.companion`.

    python -m examples.research.rivals.companion_tables               # all of them, from the records that there are
    python -m examples.research.rivals.companion_tables --rounds 0 1  # in the seeds of the choice in place of new ones

Gains are over plain training (CE) with the same seed. The table of the search is of validation images alone; the
others are of test images, and show chosen rows only. What was not run yet has an empty cell.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import grid
from examples.research import records
from examples.research.rivals import choice, companion, selection
from examples.research.rivals.cells import HEADS, RowOf, against_today, cell_of, gain_of
from examples.research.rivals.companion import AVERAGED, CONTROLS, KEPT, PREDICTORS, TODAY, Pair, pair_row
from examples.research.rivals.companion_queue import LOGITS, RIVALS, WRONG, candidates
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
from examples.research.table import by_seed

Rounds = tuple[int, ...]

AVERAGES = "averages of the weights"  # of plain training, a control that is no row of DCL's own
NAMES = (*CONTROLS, AVERAGES, LOGITS)
OF_CHOICE = "seeds of the choice"  # what marks a gain that was not measured in the seeds of the table
DCP = "DCP default"  # a row of the rivals
NETWORKS = [predictor for predictor in PREDICTORS if predictor != KEPT]


# ---- the search and its confirmation ---------------------------------------------------------------------------------


def search(folder: Path, predictor: str = "model") -> str:
    """All pairs on validation images, the smallest mean regret first; those that miss a setting come last."""
    settings = companion.searched(folder, predictor)
    judged = {one.pair: one for one in companion.judge(settings)}
    lines = []
    for pair in [*judged, *(pair for pair in companion.PAIRS if pair not in judged)]:
        one = judged.get(pair)
        found = [choice.gains(setting, pair_row(pair)) for setting in settings.values()]
        regret = "" if one is None else f"{one.mean_regret:.2f}"
        worst = "" if one is None else f"{min(one.gains.values()):+.1f}"
        gains = [f"{statistics.fmean(one_setting):+.1f}" if one_setting else "" for one_setting in found]
        lines.append([title_of(pair), regret, worst, *gains, str(sum(map(len, found)))])
    if judged:
        best = {name: max(judged.values(), key=lambda one: one.gains[name]) for name in settings}
        cells = [f"{one.gains[name]:+.1f} ({name_of_pair(one.pair)})" for name, one in best.items()]
        lines.append(["the best pair", "0", "", *cells, ""])
    heads = ["pair", "mean regret", "worst gain", *(HEADS[name] for name in SEARCHED), "seeds"]
    return "\n".join(grid(heads, lines, words=1))


def confirmation(folder: Path) -> str:
    """The candidates and today's default on the test images of the settings that the search has not seen."""
    return against_today(
        _confirmed(folder), _everywhere(TODAY), {name_of_pair(pair): _everywhere(pair) for pair in candidates(folder)}
    )


def decision(folder: Path) -> str:
    """What follows from the confirmation: of each candidate whether it may become the default, and which one does."""
    found = candidates(folder)
    settings = _confirmed(folder)
    said = []
    for pair in found:
        compared = companion.confirm(settings, pair)
        if compared is None:
            return "not known yet"
        worst = min(compared.by_setting, key=lambda name: compared.by_setting[name])
        least = f"the least {compared.by_setting[worst]:+.2f} with {HEADS[worst]}"
        verdict = "shown" if compared.is_shown else "not shown"
        pairs = len(compared.differences)
        said.append(
            f"{name_of_pair(pair)}, minus today's: {cell_of(compared.differences)}, {pairs} pairs, {least}: {verdict}"
        )
    return "; ".join([*said, f"the default is {title_of(companion.default(settings, found))}"])


def _confirmed(folder: Path) -> dict[str, dict[str, dict[int, float]]]:
    return {name: companion.of_place(folder, name, "test", "model", CONFIRMATION_ROUNDS) for name in CONFIRMED}


def _everywhere(pair: Pair) -> RowOf:
    return lambda name: pair_row(pair)


# ---- the network to keep ---------------------------------------------------------------------------------------------


def predictors(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """The model, its companion and the mean of both: today's default and the winner of the search."""
    pairs = [TODAY, *candidates(folder)[:1]]
    lines = []
    for place in FAST:
        test = {network: companion.of_place(folder, place, "test", network, rounds) for network in NETWORKS}
        gains = [gain_of(test[network], pair_row(pair), places=1) for pair in pairs for network in NETWORKS]
        lines.append([HEADS[place], *gains, _seeds(test["model"], list(map(pair_row, pairs)))])
    heads = [f"{title_of(pair)}: {network}" for pair in pairs for network in NETWORKS]
    return "\n".join(grid(["", *heads, "seeds"], lines, words=1))


def kept(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """The network that is kept: today's default, winner, runner-up, and the best pair of each setting."""
    pairs = [TODAY, *candidates(folder)]
    lines = []
    for place in FAST:
        test = companion.of_place(folder, place, "test", KEPT, rounds)
        rows = list(map(pair_row, pairs))
        best = companion.tuned(folder, place).get("DCL", "")
        gains = [gain_of(test, row, places=1) for row in rows]
        lines.append([HEADS[place], *gains, _with_value(gain_of(test, best, places=1), best), _seeds(test, rows)])
    heads = ["", *map(title_of, pairs), "best pair", "seeds"]
    return "\n".join(grid(heads, lines, words=1))


def which_kept(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """In how many runs the model, its companion and the mean of both are kept, in this order, with a slash between."""
    pairs = [TODAY, *candidates(folder)]
    total: list[Counter[str]] = [Counter() for _ in (*pairs, "best pair")]
    lines = []
    for place in FAST:
        seeds = _seeds_of(place, rounds)
        found = [record for record in _records_of(folder, place) if record["seed"] in seeds]
        rows = (*map(pair_row, pairs), companion.tuned(folder, place).get("DCL", ""))
        counts = [Counter(companion.kept(record) for record in found if record["label"] == row) for row in rows]
        for one, added in zip(total, counts, strict=True):
            one.update(added)
        lines.append([HEADS[place], *map(_counted, counts)])
    lines.append(["all", *map(_counted, total)])
    return "\n".join(grid(["", *map(title_of, pairs), "best pair"], lines, words=1))


def _counted(counts: Counter[str]) -> str:
    return " / ".join(str(counts[network]) for network in NETWORKS) if counts else ""


def overall(folder: Path, rounds: Rounds = CHOSEN_ROUNDS) -> str:
    """The mean over the settings of the mean gain, and the worst setting: the model, and the network that is kept.

    DCP's default in the same seeds is the last row.
    """
    pairs = [TODAY, *candidates(folder)]
    rows = {title_of(pair): dict.fromkeys(FAST, pair_row(pair)) for pair in pairs}
    rows["best pair of the setting"] = {place: companion.tuned(folder, place).get("DCL", "") for place in FAST}
    test = {
        predictor: {place: companion.of_place(folder, place, "test", predictor, rounds) for place in FAST}
        for predictor in ("model", KEPT)
    }
    lines = [
        [title, predictor, *_mean_and_worst(settings, row)]
        for title, row in rows.items()
        for predictor, settings in test.items()
    ]
    of_rivals = {place: selection.of_place(folder, name_of(place), place, "test", rounds) for place in FAST}
    lines.append([DCP, "model", *_mean_and_worst(of_rivals, dict.fromkeys(FAST, DCP))])
    return "\n".join(grid(["", "network", "mean", "worst", "settings"], lines, words=2))


def _mean_and_worst(settings: choice.AllScores, row: Mapping[str, str]) -> list[str]:
    """The mean gain of a row with its error, that of the worst setting, and how many settings it was run in."""
    found = {place: gains for place, scores in settings.items() if (gains := choice.gains(scores, row[place]))}
    if not found:
        return ["", "", "0"]
    means = {place: statistics.fmean(gains) for place, gains in found.items()}
    variances = [statistics.variance(gains) / len(gains) for gains in found.values() if len(gains) > 1]
    mean = f"{statistics.fmean(means.values()):+.1f}"
    if len(variances) == len(found):
        mean += f" ± {math.sqrt(sum(variances)) / len(found):.1f}"
    worst = min(means, key=lambda place: means[place])
    return [mean, f"{means[worst]:+.1f} ({HEADS[worst]})", str(len(found))]


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
    winner = pair_row(companion.default(_confirmed(folder), candidates(folder)))
    left: list[float] = []
    lines = []
    for place in FAST:
        found = _controls(folder, place, chosen.by_place[place].get(LOGITS), rounds)
        pair = companion.tuned(folder, place).get("DCL", winner)
        test = {network: companion.of_place(folder, place, "test", network, rounds) for network in (KEPT, "model")}
        if not choice.gains(test[KEPT], pair):
            continue
        cells = [_gain_of_control(found.get(control), rounds) for control in NAMES]
        cells += [gain_of(scores, pair, places=1) for scores in test.values()]
        best = max(found, key=lambda control: found[control].chosen_by, default="")
        differences = _minus(folder, place, pair, found[best]) if best else []
        if best and found[best].rounds == rounds:
            left += differences
        difference = _marked(cell_of(differences, places=1), found.get(best), rounds)
        lines.append([HEADS[place], *cells, best, difference, _seeds(test[KEPT], [pair])])
    lines.append(["all", *[""] * (len(NAMES) + 3), cell_of(left), str(len(left))])
    heads = [*NAMES, "DCL, best pair", "its model", "best control", "DCL minus it", "seeds"]
    return "\n".join(grid(["", *heads], lines, words=1))


def _minus(folder: Path, place: str, pair: str, control: Control) -> list[float]:
    """The accuracies of DCL's pair minus those of a control, seed by seed."""
    ours = companion.of_place(folder, place, "test", KEPT, control.rounds)
    return by_seed(ours.get(pair, {}), control.scores.get(control.label, {}))


def control_values(folder: Path) -> str:
    """The values that the controls and DCL have in each setting; of averages each run keeps its own."""
    chosen = selection.choose(folder)
    lines = []
    for place in FAST:
        labels = companion.tuned(folder, place)
        own = [labels.get(control, "").removeprefix(f"{control}, ") for control in CONTROLS]
        penalty = chosen.by_place[place].get(LOGITS, "").removeprefix(LOGITS).strip()
        lines.append([HEADS[place], *own, penalty, _short(labels.get("DCL", ""))])
    heads = ["", *CONTROLS, LOGITS, "DCL, best pair"]
    return "\n".join(grid(heads, lines, words=len(heads)))


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
    """DCL's default and its best pair beside the rivals of training with wrong labels, at their tuned values."""
    chosen = selection.choose(folder).by_place
    pairs = dict.fromkeys([TODAY, companion.default(_confirmed(folder), candidates(folder))])
    rows = {f"DCL, {title_of(pair)}": dict.fromkeys(WRONG, pair_row(pair)) for pair in pairs}
    best = {place: companion.tuned(folder, place).get("DCL", "") for place in WRONG}
    lines = []
    for title, row in (rows | {"DCL, best pair": best}).items():
        for predictor in PREDICTORS:
            scores = {place: companion.of_place(folder, place, "test", predictor, rounds) for place in WRONG}
            lines.append([title, predictor, *_in_wrong(scores, row, "DCL," if row is best else None)])
    scores = {place: selection.of_place(folder, name_of(place), place, "test", rounds) for place in WRONG}
    for method in RIVALS:
        row = {place: chosen[place].get(method, "") for place in WRONG}
        lines.append([f"{method}, tuned", "", *_in_wrong(scores, row, method)])
    heads = [head for place in WRONG for head in (HEADS[place], "seeds")]
    return "\n".join(grid(["", "network", *heads], lines, words=2))


def _in_wrong(scores: choice.AllScores, row: Mapping[str, str], method: str | None) -> list[str]:
    """The gain of a row in each setting, with its value unless the method is None, and the seeds."""
    cells = []
    for place, label in row.items():
        gain = gain_of(scores[place], label, places=1)
        cells += [gain if method is None else _with_value(gain, label, method), _seeds(scores[place], [label])]
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


def name_of_pair(pair: Pair) -> str:
    """The values of a pair."""
    return _short(pair_row(pair))


def title_of(pair: Pair) -> str:
    """The same, with a remark at today's default."""
    return f"{name_of_pair(pair)} (today)" if pair == TODAY else name_of_pair(pair)


def _short(label: str, method: str = "DCL,") -> str:
    return label.removeprefix(method).strip()


def _with_value(cell: str, label: str, method: str = "DCL,") -> str:
    """A gain with the value of its row; nothing if there is none."""
    return f"{cell} ({_short(label, method)})" if cell else ""


def _seeds(scores: choice.Scores, rows: Collection[str]) -> str:
    """How many seeds the rows that were run have; the fewest and the most if they differ."""
    counts = {len(found) for row in rows if (found := choice.gains(scores, row))}
    if len(counts) < 2:
        return "".join(map(str, counts))
    return f"{min(counts)} to {max(counts)}"


def _seeds_of(place: str, rounds: Rounds) -> set[int]:
    return {seed for one in rounds for seed in PLACES[place].of_round(one)}


def _records_of(folder: Path, place: str) -> list[records.Record]:
    return records.finished(folder, f"{companion.name_of(place)}.jsonl")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the records")
    parser.add_argument("--rounds", type=int, nargs="+", default=CHOSEN_ROUNDS, help="whose seeds are shown")
    options = parser.parse_args(arguments)
    folder = options.results
    rounds = tuple(options.rounds)
    print(f"The search, on validation images\n\n{search(folder)}")
    print(f"\nThe candidates where the search has not looked, on test images\n\n{confirmation(folder)}")
    print(f"\n{decision(folder)}")
    print(f"\nThe three networks, on test images\n\n{predictors(folder, rounds)}")
    print(f"\nThe network that is best on validation images\n\n{kept(folder, rounds)}")
    print(f"\nHow often it is the model / its companion / the mean of both\n\n{which_kept(folder, rounds)}")
    print(f"\nThe controls, in the network that is kept\n\n{controls(folder, rounds)}")
    print(f"\nTheir values\n\n{control_values(folder)}")
    print(f"\nOther networks, and AdamW\n\n{variants(folder)}")
    print(f"\nWrong labels of ten classes\n\n{wrong_labels(folder, rounds)}")
    print(f"\nOver all settings\n\n{overall(folder, rounds)}")


if __name__ == "__main__":
    main()
