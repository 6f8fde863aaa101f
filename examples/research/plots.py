"""Plots of finished experiments: gains over the length of training and the size of the network, and in settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from examples.research import evidence, pays, records, size
from examples.research.canvas import Style, finish, new_figure, styles
from examples.research.configuration import Configuration, Experiment
from examples.research.datasets import load
from examples.research.datasets.base import steps_per_epoch
from examples.research.gains import CE, Gain, Row, by_gain, gain, values
from examples.research.records import Record

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
    lengths = [steps(experiment.runs["CE"]) for experiment in experiments]
    ticks = {length: f"{length:,}" for length in lengths}
    return _curves(dict(zip(lengths, found, strict=True)), rows, ticks, "optimizer steps (log scale)", title)


def size_curves(found: Mapping[int, Sequence[Record]], rows: Mapping[str, Row], title: str) -> Figure:
    """Draw the gain in accuracy over CE against the number of parameters, a curve for each row, with standard errors.

    Args:
        found: the records by the number of parameters of the network.
        rows: what is drawn, by its name in the legend.
        title: of the figure.
    """
    ticks = {}
    for count, some in found.items():
        fit = fmean(values(some, CE, "train accuracy, %").values())
        ticks[count] = f"{count / 1000:,.0f} k\nCE fits\n{fit:.0f} %"
    return _curves(found, rows, ticks, "parameters (log scale), and training accuracy of CE", title)


def _curves(
    found: Mapping[int, Sequence[Record]], rows: Mapping[str, Row], ticks: Mapping[int, str], across: str, title: str
) -> Figure:
    """Draw gains over CE by a number, on a logarithmic scale."""
    figure = new_figure(5.2, 3.2 + 0.3 * len(rows))  # so narrow that its text can be read on a phone
    axes = figure.subplots()
    for number, ((name, row), style) in enumerate(zip(rows.items(), styles(rows).values(), strict=True)):
        gains = [gain(some, row, CE) for some in found.values()]
        x = [place * 1.03 ** (number - (len(rows) - 1) / 2) for place in found]  # or the bars hide each other
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
    axes.set_xlim(0.7 * min(found), 1.4 * max(found))
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set(xlabel=across, ylabel="test accuracy, points\n(± 1 standard error)")
    axes.grid(axis="y", alpha=0.3)
    return finish(figure, title, *axes.get_legend_handles_labels())


def forest(settings: Mapping[str, Sequence[Record]], rows: Mapping[str, Row], title: str) -> Figure:
    """Draw the gain in accuracy over CE, plus and minus two standard errors, a line for each setting and row.

    Args:
        settings: the records of each, by its name on the axis. The largest gain of the first row is on top.
        rows: what is drawn, by its name in the legend.
        title: of the figure.
    """
    first = next(iter(rows.values()))
    settings = {name: settings[name] for name in by_gain(settings, first)}
    figure = new_figure(5.2, 1.3 + 0.6 * len(settings))  # as above
    axes = figure.subplots()
    places = range(len(settings) - 1, -1, -1)
    for number, ((name, row), style) in enumerate(zip(rows.items(), styles(rows).values(), strict=True)):
        gains = [gain(some, row, CE) for some in settings.values()]
        offset = 0.28 * ((len(rows) - 1) / 2 - number)
        _draw_intervals(axes, [place + offset for place in places], gains, name, style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(
        list(places), [name.replace(", ", ",\n").replace(" in ", "\nin ", 1) for name in settings], fontsize="small"
    )
    axes.set_xlabel("test accuracy, points\n(± 2 standard errors)")
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


def draw(experiments: Mapping[str, Experiment], results: Path, images: Path) -> list[Path]:
    """Draw every plot whose experiments have records."""

    def read(name: str) -> list[Record]:
        return records.finished(results, f"{name}.jsonl")

    figures: dict[str, Figure] = {}
    names = [f"length-kanji-{length}" for length in evidence.LENGTHS["kanji"]]
    made = {name: found for name in names if (found := read(name))}
    if made:
        title = f"Gain over plain training:\n{evidence.TITLES['kanji']}"
        figures["length-kanji"] = length_curves(
            [experiments[name] for name in made], list(made.values()), evidence.DRAWN, title
        )
    of_size = {
        size.parameters("scripts", name): found
        for name in size.NETWORKS
        if (found := [record for run in (*size.runs_of(name), size.others_of(name)) for record in read(run)])
    }
    if of_size:
        title = f"Gain over plain training by size of ResNet-10,\nuntuned: {evidence.TITLES['scripts']}"
        figures["size-scripts"] = size_curves(of_size, size.CURVES, title)
    settings = {pays.PAYS[name]: found for name in pays.DRAWN if (found := read(name))}
    if settings:
        figures["pays"] = forest(settings, pays.FOREST, "Gain over plain training")
    images.mkdir(parents=True, exist_ok=True)
    paths = [images / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path)
    return paths
