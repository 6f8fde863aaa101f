"""Draw a results file: what each method costs, what each option saves, how the cost grows. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results_file
from benchmarks.knobs import KNOBS
from dcl_optim.plots.canvas import COLOURS, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
TITLES = {
    "methods": "What each method costs",
    "knobs": "What each option of DCLOptimizer costs",
    "growth": "How the cost grows",
}
RATIO = "time of a step divided by plain training's"
Results = dict[str, Any]


def draw(results: Results, path: Path) -> list[Path]:
    """Draw each part of the results into a file beside the results' own, ``name-part.png`` for ``name.json``.

    Raises:
        ImportError: matplotlib is missing.
    """
    found = figures(results)
    paths = [path.with_name(f"{path.stem}-{part}.png") for part in found]
    for one, figure in zip(paths, found.values(), strict=True):
        figure.savefig(one)
    return paths


def figures(results: Results) -> dict[str, Figure]:
    """Draw what the results hold, a figure for each part: a panel for all its networks, or one a series that grows."""
    drawing = {"methods": _cost, "knobs": _cost, "growth": _growth}
    return {part: draw_part(part, results[part]) for part, draw_part in drawing.items() if results.get(part)}


def _cost(part: str, tables: list[Results]) -> Figure:
    """A line a row, a mark a network at its time divided by plain's, the quartiles as a bar."""
    wanted = [row["name"] for table in tables for row in table["rows"] if part == "methods" or row["name"] in KNOBS]
    names = list(dict.fromkeys(wanted))
    figure = new_figure(7, 1.6 + 0.36 * len(names))
    axes = figure.subplots()
    for index, table in enumerate(tables):
        rows = [row for row in table["rows"] if row["name"] in names]
        ratios = [row["ratio_to_plain"] for row in rows]
        axes.errorbar(
            [ratio["median"] for ratio in ratios],
            [names.index(row["name"]) + 0.14 * (index - (len(tables) - 1) / 2) for row in rows],
            xerr=[
                [ratio["median"] - ratio["lower"] for ratio in ratios],
                [ratio["upper"] - ratio["median"] for ratio in ratios],
            ],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            markersize=5,
            label=f"{table['title']}, batch {table['batch_size']}",
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel(RATIO)
    axes.grid(axis="x", alpha=0.3)
    return finish(figure, TITLES[part], *axes.get_legend_handles_labels())


def _growth(part: str, series: list[Results]) -> Figure:
    """A panel a series, a line a method: its time divided by plain's over what grows."""
    rows = (len(series) + 1) // 2
    figure = new_figure(7, 1 + 2.4 * rows)
    panels = figure.subplots(rows, 2, squeeze=False).ravel().tolist()
    for axes in panels[len(series) :]:
        axes.remove()
    for axes, one in zip(panels, series, strict=False):
        _grow(axes, one)
    figure.supylabel(RATIO, fontsize="medium")
    return finish(figure, TITLES[part], *panels[0].get_legend_handles_labels())


def _grow(axes: Axes, series: Results) -> None:
    for index, name in enumerate(("DCLOptimizer", "DCPOptimizer")):
        of_method = [
            (point["size"], row["ratio_to_plain"])
            for point in series["points"]
            for row in point["rows"]
            if row["name"] == name
        ]
        if of_method:
            sizes, ratios = [size for size, _ in of_method], [ratio for _, ratio in of_method]
            colour = COLOURS[index + 1]
            axes.plot(sizes, [r["median"] for r in ratios], MARKERS[index] + "-", color=colour, label=name)
            lower, upper = [r["lower"] for r in ratios], [r["upper"] for r in ratios]
            axes.fill_between(sizes, lower, upper, color=colour, alpha=0.2)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")  # a short axis would have its minor labels run together
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(series["title"], fontsize="small")


def main(arguments: list[str]) -> None:
    """Read a results file and draw it beside itself."""
    path, results = results_file.read("plot", __doc__, arguments)
    try:
        for drawn in draw(results, path):
            print(drawn)
    except ImportError as error:
        sys.exit(f"python -m benchmarks plot: {error}")
