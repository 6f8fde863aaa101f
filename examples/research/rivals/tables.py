"""The tables of the rivals: one value for all, tuned, and DCP on top.

    python -m examples.research.rivals.tables  # all of them, from the records that there are

Test accuracies are of chosen values only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.table import grid
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus, probability_cell
from examples.research import records
from examples.research.gain_tables import SHOWN
from examples.research.rivals import choice, selection, values
from examples.research.rivals.cells import HEADS, cell_of, gain_of
from examples.research.rivals.experiments import name_of, top_of
from examples.research.rivals.settings import CHOICE_ROUNDS, CHOSEN_ROUNDS, EXPENSIVE, FAST
from examples.research.table import probability


def measured(folder: Path, part: str, rounds: tuple[int, ...]) -> dict[str, dict[str, dict[int, float]]]:
    """The accuracies of the fast settings in the seeds of some rounds."""
    return {name: selection.of_place(folder, name_of(name), name, part, rounds) for name in FAST}


def summary(folder: Path, rounds: tuple[int, ...] = CHOICE_ROUNDS) -> str:
    """(a) and (b) in short: the mean gain of each method over the settings, and the worst gain of (b)."""
    chosen = selection.choose(folder)
    test = measured(folder, "test", rounds)
    lines = []
    for method, label in chosen.for_one.items():
        one = [choice.mean_gain(setting, label) for setting in test.values()]
        labels = [chosen.by_place[name].get(method) for name in FAST]
        tuned = [
            None if row is None else choice.mean_gain(test[name], row) for name, row in zip(FAST, labels, strict=True)
        ]
        if None not in one and None not in tuned:
            means = [f"{statistics.fmean(found):+.1f}" for found in (one, tuned)]
            lines.append([method, _value(method, label), *means, f"{min(tuned):+.1f}"])
    lines.sort(key=lambda line: -float(line[2]))
    heads = ["method", "value", "one value", "tuned", "worst, tuned"]
    return "\n".join(grid(heads, lines, words=2))


def in_new_seeds(folder: Path, rounds: tuple[int, ...] = CHOSEN_ROUNDS) -> str:
    """The chosen rows in seeds that no choice has seen: at one value for all, and tuned for the setting."""
    chosen = selection.choose(folder)
    (default,) = values.LABELS["DCP"]
    lines = []
    for name in FAST:
        scores = selection.of_place(folder, name_of(name), name, "test", rounds)
        plain = chosen.by_place[name]["CE"]
        one = [gain_of(scores, label, places=1) for label in (default, *chosen.ahead)]
        tuned_rows = [
            label if label == "CE" else f"{gain_of(scores, label, places=1)} ({label})"
            for label in (plain, *chosen.ahead_in[name])
        ]
        lines.append([HEADS[name], *one, *tuned_rows, str(len(scores.get(default, {})))])
    best = ["best rival, tuned", "second"][: selection.BEST]
    return "\n".join(grid(["", "DCP", *chosen.ahead, "CE, tuned", *best, "seeds"], lines, words=1))


def overview(folder: Path, titles: Mapping[str, str], rounds: tuple[int, ...] = CHOSEN_ROUNDS) -> str:
    """What a first page shows of fast settings: the best rival by (b) and DCP's default, in seeds of no choice.

    Gains are over plain training. Bold is p < 0.01 of the paired t-test, with Holm's correction for the table.
    """
    chosen = selection.choose(folder)
    gains: dict[str, list[float]] = {}
    plain: dict[str, float] = {}
    for place in titles:
        scores = selection.of_place(folder, name_of(place), place, "test", rounds)
        for label in (chosen.ahead_in[place][0], *values.LABELS["DCP"]):
            gains[f"{place}, {method_of(label)}"] = choice.gains(scores, label)
        plain[place] = statistics.fmean(scores["CE"].values())
    shown = {cell for cell, p in _corrected(gains).items() if p < SHOWN}
    lines = []
    for place, title in titles.items():
        line = [title, f"{plain[place]:.1f}"]
        for method in (method_of(chosen.ahead_in[place][0]), "DCP"):
            cell = f"{place}, {method}"
            gain = f"{statistics.fmean(gains[cell]):+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
            bold = f"**{gain}**" if cell in shown else gain
            line.append(bold if method == "DCP" else f"{bold} {method}")
        lines.append(line)
    return "\n".join(grid(["data", "plain, %", "best rival, tuned", "DCP"], lines, words=1))


def method_of(label: str) -> str:
    """The method of a row."""
    return next(method for method, labels in values.LABELS.items() if label in labels)


def expensive(folder: Path) -> str:
    """ResNet-10 and EfficientNet-Lite0 with DCP's default and the best rivals at one value for all."""
    chosen = selection.choose(folder)
    lines = []
    for name, place in EXPENSIVE.items():
        scores = selection.of_place(folder, name_of(name), name, "test", CHOICE_ROUNDS)
        plain = scores.get("CE", {})
        if plain:
            gains = [gain_of(scores, label) for label in chosen.for_all()[1:]]
            lines.append(
                [
                    place.title.replace("150 Japanese characters in unseen fonts", "kanji"),
                    f"{statistics.fmean(plain.values()):.1f}",
                    *gains,
                    str(len(plain)),
                ]
            )
    return "\n".join(grid(["", "CE, %", *chosen.for_all()[1:], "seeds"], lines, words=1))


def _corrected(gains: Mapping[str, list[float]]) -> dict[str, float]:
    """The p of gains after Holm's correction, by their name; those without a spread have none."""
    return holm({name: p for name, found in gains.items() if (p := probability(found)) is not None})


def on_top(folder: Path, rounds: tuple[int, ...] = CHOSEN_ROUNDS) -> str:
    """(c): what DCP's default gains on top of tuned plain training and of the best rivals of each setting."""
    chosen = selection.choose(folder)
    cells: dict[tuple[str, str], list[float]] = {}
    for name in FAST:
        alone = selection.of_place(folder, name_of(name), name, "test", rounds)
        both = selection.of_place(folder, top_of(name), name, "test", rounds)
        for label in chosen.under[name]:
            found = choice.gains({**both, label: alone.get(label, {})}, values.top_label(label), label)
            if found:
                cells[name, label] = found
    p = _corrected({f"{name}\n{label}": found for (name, label), found in cells.items()})
    lines = []
    for name in FAST:
        line = [HEADS[name]]
        for label in [label for place, label in cells if place == name]:
            gain = f"{cell_of(cells[name, label], places=1)}"
            shown = p.get(f"{name}\n{label}", 1.0) < SHOWN
            line.append(f"**{gain}** ({label})" if shown else f"{gain} ({label})")
        lines.append(line)
    width = max(map(len, lines))
    heads = ["", "on tuned plain training", *(f"on a rival ({number})" for number in range(1, width - 1))]
    return "\n".join(grid(heads, [[*line, *[""] * (width - len(line))] for line in lines], words=width))


def against_best(folder: Path, rounds: tuple[int, ...] = CHOSEN_ROUNDS) -> str:
    """The test of (a): DCP's default minus the best rival, chosen on validation, over all settings and seeds."""
    chosen = selection.choose(folder)
    if not chosen.ahead or "DCP" not in chosen.for_one:
        return "not known yet"
    best = chosen.ahead[0]
    test = measured(folder, "test", rounds)
    found = [one for setting in test.values() for one in choice.gains(setting, chosen.for_one["DCP"], best)]
    if not found:
        return f"the best rival on validation images is {best}; no pair is measured in these seeds"
    p = probability_cell(probability(found))
    difference = plus_minus(*mean_and_error(found), sign="+")
    return f"DCP's default minus {best}, the best rival on validation images: {difference}, p {p}, {len(found)} pairs"


def _value(method: str, label: str) -> str:
    """A row's value, without the method's name."""
    return label.removeprefix(method).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the records")
    options = parser.parse_args(arguments)
    folder = options.results
    for title, table in TABLES.items():
        print(f"{title}\n\n{table(folder)}\n")


TABLES = {
    "All methods": summary,
    "DCP's default against the best rival": against_best,
    "In new seeds": in_new_seeds,
    "On top": on_top,
    "ResNet-10 and EfficientNet-Lite0": expensive,
}

if __name__ == "__main__":
    main()
