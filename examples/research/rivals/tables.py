"""The tables of the rivals: one value for all, tuned, DCP on top, and the search for the default.

    python -m examples.research.rivals.tables                 # all of them, from the records that there are
    python -m examples.research.rivals.tables --rounds 3 4 5  # in the seeds that no choice has seen

Test accuracies are of chosen values only; the table of the search is of validation images alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.table import grid
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus, probability_cell
from examples.research import records
from examples.research.gain_tables import SHOWN
from examples.research.rivals import choice, rules, selection, values
from examples.research.rivals.cells import HEADS, against_today, cell_of, gain_of
from examples.research.rivals.experiments import name_of, search_of, top_of
from examples.research.rivals.settings import (
    CHOICE_ROUNDS,
    CHOSEN_ROUNDS,
    CONFIRMATION_ROUNDS,
    CONFIRMED,
    EXPENSIVE,
    FAST,
    PLACES,
    SEARCH_ROUNDS,
    SEARCHED,
    SECOND_ROUNDS,
)
from examples.research.table import probability

RULES_SHOWN = 12


def measured(folder: Path, part: str, rounds: tuple[int, ...]) -> dict[str, dict[str, dict[int, float]]]:
    """The accuracies of the fast settings in the seeds of some rounds."""
    return {name: selection.of_place(folder, name_of(name), name, part, rounds) for name in FAST}


def one_value(folder: Path, rounds: tuple[int, ...] = CHOICE_ROUNDS) -> str:
    """(a): each method with one value for all settings, the largest mean gain on test images first."""
    chosen = selection.choose(folder).for_one
    test = measured(folder, "test", rounds)
    lines = []
    for method, label in chosen.items():
        gains = [choice.mean_gain(setting, label) for setting in test.values()]
        lines.append((method, _value(method, label), gains))
    return _by_setting(lines, ["method", "value"])


def tuned(folder: Path, rounds: tuple[int, ...] = CHOICE_ROUNDS) -> str:
    """(b): each method with its value for the setting, plain training with its learning rate and weight decay."""
    chosen = selection.choose(folder).by_place
    test = measured(folder, "test", rounds)
    lines = []
    for method in ("CE", *values.METHODS):
        labels = [chosen[name].get(method) for name in FAST]
        gains = [
            None if label is None else choice.mean_gain(test[name], label)
            for name, label in zip(FAST, labels, strict=True)
        ]
        lines.append(("CE, tuned" if method == "CE" else method, "", gains))
    return _by_setting(lines, ["method"])


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


def tuned_values(folder: Path) -> str:
    """The values of (b)."""
    chosen = selection.choose(folder).by_place
    lines = [
        [method, *(_value(method, chosen[name].get(method, "")) for name in FAST)]
        for method in ("CE", *values.METHODS)
        if any(_value(method, chosen[name].get(method, "")) for name in FAST)
    ]
    return "\n".join(grid(["method", *HEADS.values()], lines, words=1 + len(HEADS)))


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


def search(folder: Path, rounds: tuple[int, ...] = SEARCH_ROUNDS, shown: int | None = RULES_SHOWN) -> str:
    """The rules with the smallest regret, today's default, and the best fixed pair of each setting, on validation."""
    found = selection.searched(folder, rounds)
    classes = {name: PLACES[name].classes for name in SEARCHED}
    judged = choice.judge(found, classes, rules.RULES)
    today = [one for one in judged[shown:] if one.rule == rules.TODAY] if shown is not None else []
    lines = [
        [
            f"{one.rule} (today)" if one.rule == rules.TODAY else str(one.rule),
            f"{one.mean_regret:.2f}",
            f"{min(one.gains.values()):+.1f}",
            *(f"{one.gains[name]:+.1f}" for name in SEARCHED),
        ]
        for one in [*judged[:shown], *today]
    ]
    references = [rules.fixed_row(weight, alpha) for weight, alpha in rules.REFERENCES]
    best = {name: choice.tuned(setting, references) for name, setting in found.items()}
    gains = {name: choice.mean_gain(found[name], label) for name, label in best.items() if label is not None}
    cells = [f"{gains[name]:+.1f} ({best[name]})" if name in gains else "" for name in SEARCHED]
    lines.append(["the best fixed pair", "0", "", *cells])
    heads = ["rule", "mean regret", "worst gain", *(HEADS[name] for name in SEARCHED)]
    return "\n".join(grid(heads, lines, words=1))


def confirmation(folder: Path) -> str:
    """The first candidate and today's default on the test images of the settings that the search has not seen."""
    return _candidates(folder, CONFIRMED, (rules.CANDIDATE,), CONFIRMATION_ROUNDS)


def second_confirmation(folder: Path) -> str:
    """The second candidates, where the search has not looked."""
    return _candidates(folder, CONFIRMED, rules.SECOND_CANDIDATES, SECOND_ROUNDS)


def second_in_searched(folder: Path) -> str:
    """The second candidates in the settings of the search, on test images and in new seeds."""
    return _candidates(folder, SEARCHED, rules.SECOND_CANDIDATES, SECOND_ROUNDS)


def candidates(folder: Path) -> str:
    """All candidates in short: the mean of their gain minus today's, over all settings and seeds."""
    tests = (
        (rules.CANDIDATE, "others", CONFIRMED, CONFIRMATION_ROUNDS),
        *((rule, "others", CONFIRMED, SECOND_ROUNDS) for rule in rules.SECOND_CANDIDATES),
        *((rule, "those of the search", SEARCHED, SECOND_ROUNDS) for rule in rules.SECOND_CANDIDATES),
    )
    lines = []
    for rule, title, names, rounds in tests:
        found: list[float] = []
        for name in names:
            scores = selection.of_place(folder, search_of(name), name, "test", rounds)
            found += choice.gains(scores, _row_in(rule, name), _row_in(rules.TODAY, name))
        lines.append([str(rule), title, cell_of(found), str(len(found))])
    return "\n".join(grid(["rule", "settings", "minus today's", "pairs"], lines, words=2))


def _candidates(folder: Path, names: Sequence[str], candidates: Sequence[rules.Rule], rounds: tuple[int, ...]) -> str:
    settings = {name: selection.of_place(folder, search_of(name), name, "test", rounds) for name in names}
    rows = {str(candidate): partial(_row_in, candidate) for candidate in candidates}
    return against_today(settings, partial(_row_in, rules.TODAY), rows)


def _row_in(rule: rules.Rule, name: str) -> str:
    return rule.row(PLACES[name].classes)


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


def seeds(folder: Path) -> str:
    """How many seeds each setting has, of CE and of the row with the fewest."""
    lines = []
    for name in FAST:
        found = selection.of_place(folder, name_of(name), name, "validation", CHOICE_ROUNDS)
        wanted = list(values.rows(PLACES[name].plain))
        plain = found.get("CE", {})
        accuracy = f"{statistics.fmean(plain.values()):.1f}" if plain else ""
        counts = [str(len(plain)), str(sum(label in found for label in wanted)), str(len(wanted))]
        lines.append([PLACES[name].title, accuracy, *counts])
    return "\n".join(grid(["", "CE, validation, %", "seeds of CE", "rows with a run", "rows"], lines, words=1))


def _by_setting(lines: Sequence[tuple[str, str, Sequence[float | None]]], words: list[str]) -> str:
    """A table of gains by the setting, with their mean and the worst; methods that were not run in all are left out."""
    complete = []
    for method, value, gains in lines:
        known = [gain for gain in gains if gain is not None]
        if len(known) == len(gains):
            complete.append((statistics.fmean(known), [method, value][: len(words)], known))
    complete.sort(key=lambda line: -line[0])
    rows = [
        [*names, f"{mean:+.1f}", f"{min(known):+.1f}", *(f"{gain:+.1f}" for gain in known)]
        for mean, names, known in complete
    ]
    return "\n".join(grid([*words, "mean", "worst", *HEADS.values()], rows, words=len(words)))


def _value(method: str, label: str) -> str:
    """A row's value, without the method's name."""
    return label.removeprefix(method).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the records")
    parser.add_argument("--rounds", type=int, nargs="+", default=CHOICE_ROUNDS, help="whose seeds are shown")
    options = parser.parse_args(arguments)
    rounds = tuple(options.rounds)
    print(seeds(options.results))
    for title, table in (("(a) One value for all", one_value), ("(b) Tuned", tuned)):
        print(f"\n{title}\n\n{table(options.results, rounds)}")
    print(f"\n{against_best(options.results)}")
    print(f"\nIn new seeds\n\n{in_new_seeds(options.results)}")
    print(f"\nResNet-10 and EfficientNet-Lite0\n\n{expensive(options.results)}")
    print(f"\nThe tuned values\n\n{tuned_values(options.results)}")
    print(f"\n(c) On top\n\n{on_top(options.results)}")
    print(f"\nThe search for the default, on validation images\n\n{search(options.results)}")
    print(f"\nThe first candidate where the search has not looked, on test images\n\n{confirmation(options.results)}")
    print(f"\nThe second candidates there\n\n{second_confirmation(options.results)}")
    print(f"\nThe second candidates in the settings of the search\n\n{second_in_searched(options.results)}")


if __name__ == "__main__":
    main()
