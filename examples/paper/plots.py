"""Plots of finished experiments: gains over the length of training, and over all settings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dcl_optim.plots.canvas import Style, finish, new_figure, styles
from examples.paper import evidence, pays, records
from examples.paper.configuration import Configuration, Experiment
from examples.paper.datasets import load
from examples.paper.datasets.base import steps_per_epoch
from examples.paper.gains import CE, Gain, Row, gain
from examples.paper.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def steps(configuration: Configuration) -> int:
    """How many optimizer steps a configuration's training has."""
    count = configuration.train_size or load(configuration.data).train_size()
    return configuration.epochs * steps_per_epoch(count, configuration.batch_size)


def length_curves(
    experiments: Sequence[Experiment], found: Sequence[Sequence[Record]], rows: Mapping[str, Row], title: str
) -> Figure:
    """Draw the gain in accuracy over CE against the number of steps, a curve for each row, with standard errors.

    Args:
        experiments: of the same rows, each of another length.
        found: the records of each.
        rows: what is drawn, by its name in the legend.
        title: of the figure.
    """
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    lengths = [steps(experiment.runs["CE"]) for experiment in experiments]
    for number, ((name, row), style) in enumerate(zip(rows.items(), styles(rows).values(), strict=True)):
        gains = [gain(some, row, CE) for some in found]
        x = [length * 1.03 ** (number - (len(rows) - 1) / 2) for length in lengths]  # or the bars hide each other
        axes.errorbar(
            [one for one, known in zip(x, gains, strict=True) if known],
            [known.mean for known in gains if known],
            [known.error or 0.0 for known in gains if known],
            label=name,
            **style.of_points(),
            linestyle=style.line,
            markersize=5,
            capsize=2,
            linewidth=1.3,
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.7 * lengths[0], 1.4 * lengths[-1])
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set(xlabel="optimizer steps (log scale)", ylabel="test accuracy minus CE, points\n(± 1 standard error)")
    axes.grid(axis="y", alpha=0.3)
    return finish(figure, title, *axes.get_legend_handles_labels())


def forest(settings: Mapping[str, Sequence[Record]], rows: Mapping[str, Row], title: str) -> Figure:
    """Draw the gain in accuracy over CE, plus and minus two standard errors, a line for each setting and row.

    Args:
        settings: the records of each, by its name on the axis.
        rows: what is drawn, by its name in the legend.
        title: of the figure.
    """
    figure = new_figure(7, 1.4 + 0.42 * len(settings))
    axes = figure.subplots()
    places = range(len(settings) - 1, -1, -1)
    for number, ((name, row), style) in enumerate(zip(rows.items(), styles(rows).values(), strict=True)):
        gains = [gain(some, row, CE) for some in settings.values()]
        offset = 0.28 * ((len(rows) - 1) / 2 - number)
        _draw_intervals(axes, [place + offset for place in places], gains, name, style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(list(places), list(settings))
    axes.set_xlabel("points of test accuracy (± 2 standard errors)")
    axes.grid(axis="x", alpha=0.3)
    return finish(figure, title, *axes.get_legend_handles_labels())


def _draw_intervals(axes: Axes, places: Sequence[float], gains: Sequence[Gain | None], name: str, style: Style) -> None:
    known = [(place, found) for place, found in zip(places, gains, strict=True) if found]
    axes.errorbar(
        [found.mean for _, found in known],
        [place for place, _ in known],
        xerr=[2 * (found.error or 0.0) for _, found in known],
        label=name,
        **style.of_points(),
        linestyle="",
        capsize=3,
    )


def spread_curves(histories: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], title: str) -> Figure:
    """Draw the size of the logits and their spread over the epochs, the mean over the runs.

    Args:
        histories: for each method its runs; a run has ``top``, ``within`` and ``between``, one value per epoch each.
        title: of the figure.
    """
    figure = new_figure(7, 7.5)
    panels = {
        "largest logit\nminus the mean": lambda run: run["top"],
        "spread within classes": lambda run: run["within"],
        "within divided by between": lambda run: [a / b for a, b in zip(run["within"], run["between"], strict=True)],
    }
    for axes, (label, measure) in zip(figure.subplots(3, 1, sharex=True), panels.items(), strict=True):
        for (method, runs), style in zip(histories.items(), styles(histories).values(), strict=True):
            means = [statistics.fmean(values) for values in zip(*map(measure, runs), strict=True)]
            epochs, marks = range(1, len(means) + 1), range(0, len(means), max(1, len(means) // 8))
            axes.plot(epochs, means, **style.of_points(), linestyle=style.line, markevery=marks, label=method)
        # The first epochs start from noise: shown in full they would press the rest, which matters, into one line.
        later = [value for line in axes.lines for value in line.get_ydata()[len(line.get_ydata()) // 10 :]]
        axes.set_ylim(0.9 * min(later), 1.1 * max(later))
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[-1].set_xlabel("epoch")
    return finish(figure, title, *figure.axes[0].get_legend_handles_labels())


def draw(experiments: Mapping[str, Experiment], results: Path, images: Path) -> list[Path]:
    """Draw every plot whose experiments have records."""

    def read(name: str) -> list[Record]:
        return records.finished(results, f"{name}.jsonl")

    figures: dict[str, Figure] = {}
    for setting in evidence.SETTINGS:
        names = [f"length-{setting}-{length}" for length in evidence.LENGTHS]
        made = {name: found for name in names if (found := read(name))}
        if made:
            title = f"Gain over plain training, {evidence.TITLES[setting]}"
            figures[f"length-{setting}"] = length_curves(
                [experiments[name] for name in made], list(made.values()), evidence.CURVES, title
            )
    settings = {title: found for name, title in pays.PAYS.items() if (found := read(name))}
    if settings:
        figures["pays"] = forest(settings, pays.FOREST, "Gain over plain training in each setting")
    images.mkdir(parents=True, exist_ok=True)
    paths = [images / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path)
    return paths
