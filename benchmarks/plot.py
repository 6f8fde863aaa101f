"""Draw a results file: what each method costs, what each option saves, how the cost grows. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results_file
from benchmarks.knobs import KNOBS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito's
MARKERS = ("o", "s", "^", "D", "v", "P")
Results = dict[str, Any]


def draw(results: Results, path: Path) -> Path:
    """Draw what the results hold into a file.

    Raises:
        ImportError: matplotlib is missing.
    """
    picture(results).savefig(path, dpi=120)
    return path


def picture(results: Results) -> Figure:
    """Draw what the results hold, one panel a table and one a series."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{error}; the picture needs: pip install -e '.[demo]'") from error
    tables = [part for part in ("methods", "knobs") if results.get(part)]
    series = results.get("growth", [])
    rows = len(tables) + (len(series) + 2) // 3
    figure = Figure(figsize=(12, 4 * max(rows, 1)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(max(rows, 1), 3)
    for index, part in enumerate(tables):
        _cost(figure.add_subplot(grid[index, :]), part, results[part])
    for index, one in enumerate(series):
        _growth(figure.add_subplot(grid[len(tables) + index // 3, index % 3]), one)
    return figure


def _cost(axes: Axes, part: str, tables: list[Results]) -> None:
    """A line a row, a mark a network at its time divided by plain's, the quartiles as a bar."""
    wanted = [row["name"] for figures in tables for row in figures["rows"] if part == "methods" or row["name"] in KNOBS]
    names = list(dict.fromkeys(wanted))
    for index, figures in enumerate(tables):
        rows = [row for row in figures["rows"] if row["name"] in names]
        ratios = [row["ratio_to_plain"] for row in rows]
        axes.errorbar(
            [ratio["median"] for ratio in ratios],
            [names.index(row["name"]) + 0.12 * (index - (len(tables) - 1) / 2) for row in rows],
            xerr=[
                [ratio["median"] - ratio["lower"] for ratio in ratios],
                [ratio["upper"] - ratio["median"] for ratio in ratios],
            ],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            markersize=5,
            label=f"{figures['title']}, batch {figures['batch_size']}",
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("time of a step ÷ plain")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)


def _growth(axes: Axes, series: Results) -> None:
    """A line a method: its time divided by plain's over what grows."""
    points = series["points"]
    for index, name in enumerate(("DCLOptimizer", "DCPOptimizer")):
        of_method = [(point["size"], row["ratio_to_plain"]) for point in points for row in point["rows"]
                     if row["name"] == name]  # fmt: skip
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
    axes.set_xlabel(series["title"])
    axes.set_ylabel("time of a step ÷ plain")
    axes.legend(fontsize=8)


def main(arguments: list[str]) -> None:
    """Read a results file and draw it beside itself."""
    path, results = results_file.read("plot", __doc__, arguments)
    try:
        print(draw(results, path.with_suffix(".png")))
    except ImportError as error:
        sys.exit(f"python -m benchmarks plot: {error}")
