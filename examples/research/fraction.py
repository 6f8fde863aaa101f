"""Whether ``companion_fraction`` below 1 costs accuracy: DCL with f = 1, 0.5 and 0.25 of the rows.

Fixed before the runs. The settings are those in which ``docs/results`` has a number of DCL with today's default,
λ = 0.1 and α = 0.99: the eleven of the rivals and the ten tables of numbers. The settings whose numbers are of the
older default, α = 0.6, are not run again; most have the same data. Ten new seeds each, accuracy on test images and
rows, of the model and of its companion, paired by seed with f = 1.

A second plan, after the first was run and before its own runs: what those 21 lack of the older settings, AdamW and
short training, in ``ADDED``. The same criterion, over these three alone.

A fraction can be the default if two things hold for the model and for the companion. In the mean over the settings the
difference to f = 1 is at least -0.3 points. In no setting is it below 0 with p < 0.05 of the paired t-test, after
Holm's correction over the cells of this fraction. The default becomes 0.5 if 0.5 passes, and 0.25 if 0.25 passes too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.table import grid
from dcl_optim.trial.paired import holm, mean_and_error, plus_minus
from examples.research import pays, records, tabular
from examples.research.configuration import Configuration, Experiment
from examples.research.evidence import KANJI
from examples.research.gain_tables import ACCURACY
from examples.research.gains import Gain, Row, gain, values
from examples.research.rivals.cells import HEADS
from examples.research.rivals.settings import FAST
from examples.research.wrong_labels import DCL

FRACTIONS = (1.0, 0.5, 0.25)
SEEDS = 10
FIRST_SEED = 200


def label_of(fraction: float) -> str:
    """The row of a fraction."""
    return f"DCL, f = {fraction:g}"


def _rows(plain: Configuration) -> dict[str, Configuration]:
    return {
        label_of(fraction): replace(plain, method="dcl", options=DCL | {"companion_fraction": fraction})
        for fraction in FRACTIONS
    }


def _settings() -> dict[str, tuple[str, Configuration]]:
    """The title of each setting and its plain training, by the name of its experiment."""
    found = {f"fraction-{name}": (place.title, place.plain) for name, place in FAST.items()}
    for name, (title, _) in tabular.SETTINGS.items():
        found[f"fraction-{name}"] = title, tabular.EXPERIMENTS[name].runs["CE"]
    return found


SETTINGS = _settings()
ADDED = {
    "fraction-kanji-adamw": pays.PLACES["kanji-adamw"],
    "fraction-text-adamw": pays.PLACES["debian-adamw"],
    "fraction-kanji-1k": (pays.PAYS["length-kanji-1k"], replace(KANJI, epochs=KANJI.epochs // 4)),
}
EXPERIMENTS = {
    name: Experiment(f"a share of the rows: {title}", "test", SEEDS, label_of(1.0), _rows(plain), FIRST_SEED)
    for name, (title, plain) in (SETTINGS | ADDED).items()
}

PREDICTORS = ("model", "companion")
LIMIT = -0.3  # points, in the mean over the settings
SHOWN = 0.05  # the corrected p below which a difference counts as shown


Settings = dict[str, tuple[str, Configuration]]


def differences(folder: Path, fraction: float, predictor: str, settings: Settings = SETTINGS) -> dict[str, Gain]:
    """What a fraction changes in each setting, paired with f = 1, by the setting's title."""
    whole = Row(label_of(1.0), predictor)
    found = {}
    for name, (title, _) in settings.items():
        one = gain(records.finished(folder, f"{name}.jsonl"), Row(label_of(fraction), predictor), whole)
        if one is not None:
            found[title] = one
    return found


def behind(folder: Path, fraction: float, settings: Settings = SETTINGS) -> dict[str, float]:
    """The settings and predictors in which a fraction is shown to be behind, with the corrected p."""
    found = {(one, title): g for one in PREDICTORS for title, g in differences(folder, fraction, one, settings).items()}
    p = holm({key: g.p for key, g in found.items() if g.p is not None})
    return {
        f"{title}, {one}": p[one, title] for one, title in p if found[one, title].mean < 0 and p[one, title] < SHOWN
    }


def passes(folder: Path, fraction: float, settings: Settings = SETTINGS) -> bool:
    """Whether a fraction can be the default."""
    means = [fmean(g.mean for g in differences(folder, fraction, one, settings).values()) for one in PREDICTORS]
    return min(means) >= LIMIT and not behind(folder, fraction, settings)


def table(folder: Path, settings: Settings = SETTINGS) -> str:
    """The accuracy with f = 1, and what the fractions change, of model and companion."""
    columns = [(one, fraction) for one in PREDICTORS for fraction in FRACTIONS]
    found = {(one, f): differences(folder, f, one, settings) for one, f in columns if f != 1}
    lines = []
    for name, (title, _) in settings.items():
        made = records.finished(folder, f"{name}.jsonl")
        cells = [HEADS.get(name.removeprefix("fraction-"), title)]
        for one, fraction in columns:
            if fraction == 1:
                accuracies = list(values(made, Row(label_of(1.0), one), ACCURACY).values())
                cells.append(plus_minus(*mean_and_error(accuracies), places=1))
            else:
                g = found[one, fraction][title]
                cells.append(plus_minus(g.mean, g.error, sign="+", places=1))
        lines.append(cells)
    means = [
        "" if fraction == 1 else f"{fmean(g.mean for g in found[one, fraction].values()):+.2f}"
        for one, fraction in columns
    ]
    heads = [f"{one}, f = 1, %" if f == 1 else f"{one}, f = {f:g} minus f = 1" for one, f in columns]
    return "\n".join(grid(["", *heads], [*lines, ["mean", *means]], words=1))


if __name__ == "__main__":
    for among in (SETTINGS, ADDED):
        print(table(records.RESULTS, among))
        for share in FRACTIONS[1:]:
            found = records.RESULTS, share, among
            print(f"f = {share:g}: passes: {passes(*found)}; behind: {behind(*found)}")
