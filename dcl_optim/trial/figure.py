"""The figure of a comparison: curves with bands, and the gain of each seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dcl_optim.trial.paired import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]

# Okabe and Ito's colors, which color-blind eyes can tell apart.
COLORS = ("#000000", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9")


def draw(curves: Mapping[str, Any], gains: Mapping[str, Any], title: str) -> Figure:
    """Draw the mean curves with bands of one standard error, and the gain of each seed over the first method.

    Args:
        curves: for each method the values of its runs. Unless all runs have equally many, two or more, there are gains
            alone.
        gains: for each method those of its runs over the first one, all finite.
        title: the line above.
    """
    from matplotlib.figure import Figure  # without pyplot and its global state

    lengths = {len(run) for runs in curves.values() for run in runs}
    panels = 2 if len(lengths) == 1 and lengths != {1} else 1
    figure = Figure(figsize=(7, 3.4 * panels), dpi=150, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    for one in axes:
        one.grid(alpha=0.3)
    if panels > 1:
        _draw_curves(axes[0], curves)
    _draw_gains(axes[-1], gains)
    return figure


def _draw_curves(axes: Any, curves: Mapping[str, Any]) -> None:
    axes.set_prop_cycle(color=COLORS)
    lows = []
    for name, runs in curves.items():
        values = np.array(runs)
        mean = values.mean(0)
        error = values.std(0, ddof=1) / len(runs) ** 0.5 if len(runs) > 1 else 0.0
        share = np.linspace(0, 100, len(mean) + 1)[1:]
        axes.plot(share, mean, label=name)
        axes.fill_between(share, mean - error, mean + error, alpha=0.2)
        lows.append(np.nanmin((mean - error)[len(mean) // 5 :]))
    # The first values climb from chance: shown in full they would press the rest, which matters, into one line.
    axes.set_ylim(bottom=min(lows))
    axes.set(xlabel="share of the training, %", ylabel="mean ± standard error")
    axes.legend()


def _draw_gains(axes: Any, gains: Mapping[str, Any]) -> None:
    """Draw a point for each seed, and below them the mean with its standard error, in a line for each method."""
    first, *others = gains
    axes.set_prop_cycle(color=COLORS[1:])
    axes.axvline(0, color="black")
    for place, name in enumerate(others):
        mean, error = mean_and_error(gains[name])
        (points,) = axes.plot(gains[name], place + np.linspace(-0.2, 0.2, len(gains[name])), "o", alpha=0.5)
        axes.errorbar(mean, place + 0.3, xerr=error, fmt="s", color=points.get_color(), capsize=4)
    axes.set_yticks(range(len(others)), others)
    axes.invert_yaxis()
    axes.set_xlabel(f"gain over {first}")
