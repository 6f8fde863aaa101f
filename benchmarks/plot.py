"""Draw a results file: the time of a step with each optimizer on each network. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results_file
from dcl_optim.plots.canvas import finish, new_figure, styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = ("DCPOptimizer", "DCLOptimizer")  # the other methods are in the tables
Results = dict[str, Any]


def draw(results: Results, path: Path) -> list[Path]:
    """Draw the methods of a results file beside it, ``name-methods.png`` for ``name.json``; nothing without them.

    Raises:
        ImportError: matplotlib is missing.
    """
    tables = results.get("methods") or []
    if not any(row["name"] in DRAWN for table in tables for row in table["rows"]):
        return []
    drawn = path.with_name(f"{path.stem}-methods.png")
    figure(tables).savefig(drawn)
    return [drawn]


def figure(tables: list[Results]) -> Figure:
    """Draw a line for each network and a mark for each optimizer: its ratio to plain training, with the quartiles."""
    made = new_figure(7, 1.4 + 0.32 * len(tables))
    axes = made.subplots()
    for name, style in styles(DRAWN).items():
        found = [(place, row) for place, table in enumerate(tables) for row in table["rows"] if row["name"] == name]
        ratios = [row["ratio_to_plain"] for _, row in found]
        axes.errorbar(
            [ratio["median"] for ratio in ratios],
            [place for place, _ in found],
            xerr=[
                [ratio["median"] - ratio["lower"] for ratio in ratios],
                [ratio["upper"] - ratio["median"] for ratio in ratios],
            ],
            **style.of_points(),
            linestyle="",
            markersize=6,
            capsize=3,
            label=name,
        )
    axes.set_yticks(range(len(tables)), [_title(table) for table in tables])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel("time divided by that of plain training")
    axes.grid(axis="x", alpha=0.3)
    return finish(made, "Time of a step, with quartiles", *axes.get_legend_handles_labels())


def _title(table: Results) -> str:
    (plain,) = (row["milliseconds"]["median"] for row in table["rows"] if row["name"] == "plain")
    return f"{table['title']}, batch {table['batch_size']}, plain {plain:.1f} ms"


def main(arguments: list[str]) -> None:
    """Read a results file and draw it beside itself."""
    path, results = results_file.read("plot", __doc__, arguments)
    try:
        for drawn in draw(results, path):
            print(drawn)
    except ImportError as error:
        sys.exit(f"python -m benchmarks plot: {error}")
