"""Accuracy over the epochs of training, and the gain of each seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcl_optim.plots.canvas import finish, new_figure, styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Mapping[str, Any]
WIDE = 70  # characters: a longer title gets a second line


def training_curves(
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    title: str = "Training with and without a companion",
    split: str = "test",
) -> Figure:
    """Draw the accuracy over the epochs, and below it the gain of each seed in the last epoch.

    The curves are means over the runs, with bands of one standard error. Gains are over the first method.

    Args:
        histories: for each method its runs; a run has ``"accuracy"``, one value per epoch in [0, 1], or nan for an
            epoch not to be drawn, and may have its ``"seed"``. All runs of all methods have equally many epochs, and
            run i of each method has the same seed. Other keys are left alone.
        title: the line above both panels. Default: ``"Training with and without a companion"``.
        split: the name of the images that the accuracy is measured on. Default: ``"test"``.

    Returns:
        The figure; its ``savefig("curves.png")`` writes it, the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: there are no methods, no runs or no epochs, or runs of different lengths.
        ImportError: matplotlib is missing.

    Examples:
        >>> run = {"accuracy": [0.5, 0.9]}
        >>> figure = training_curves({"plain": [run], "DCP": [run]}, title="digits")
        >>> figure.get_suptitle()
        'digits (1 run)'

    Source: Figure 5, right, for the accuracy.
    """
    _check(histories)
    figure = new_figure(7, 6.4)  # one panel above the other: readable in the width of a phone
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 2))
    _curves(top, histories, f"{split} accuracy [%]")
    _gains(bottom, histories)
    runs = len(next(iter(histories.values())))
    band = f"mean of {runs} runs, band: ± 1 standard error" if runs > 1 else "1 run"
    separator = "\n" if len(title) + len(band) > WIDE else " "
    return finish(figure, f"{title}{separator}({band})", *top.get_legend_handles_labels())


def _curves(axes: Any, histories: Mapping[str, Sequence[History]], label: str) -> None:
    later: list[float] = []
    for (method, runs), style in zip(histories.items(), styles(histories).values(), strict=True):
        low, mean, high = _band(runs)
        epochs = range(1, len(mean) + 1)
        marks = range(0, len(mean), max(1, len(mean) // 8))
        axes.plot(epochs, mean, **style.of_points(), linestyle=style.line, markevery=marks, markersize=4, label=method)
        axes.fill_between(epochs, low, high, color=style.color, alpha=0.18, linewidth=0)
        later += low[len(mean) // 5 :] + high[len(mean) // 5 :]
    later = [value for value in later if math.isfinite(value)] or [0.0, 100.0]
    # The first epochs climb from chance: shown in full they would press the rest, which matters, into one line.
    margin = max(0.5, 0.06 * (max(later) - min(later)))
    axes.set_ylim(min(later) - margin, max(later) + margin)
    _finish(axes, "epoch", label)


def seed_gains(
    scores: Mapping[str, Sequence[float]],
    *,
    seeds: Sequence[int] | None = None,
    title: str = "Gain of each seed",
) -> Figure:
    """Draw how much each method gains over the first one, a point for each seed and a line at the mean.

    Args:
        scores: for each method its figures, such as accuracies in percent, one for each seed.
        seeds: what to write below the points. None (default) counts from 0.
        title: the line above. Default: ``"Gain of each seed"``.

    Returns:
        The figure; its ``savefig("gains.png")`` writes it, the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: there are less than two methods, no figures, or not as many as seeds.
        ImportError: matplotlib is missing.

    Examples:
        >>> figure = seed_gains({"plain": [81.0, 83.0], "DCP": [86.0, 85.0]})
        >>> figure.axes[0].get_ylabel()
        'points above plain'
    """
    counts = {len(values) for values in scores.values()} | ({len(seeds)} if seeds is not None else set())
    if len(scores) < 2 or len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"scores has {len(scores)} methods with {sorted(counts)} seeds; it must have two methods or more, with as "
            "many figures as seeds each"
        )
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    first = next(iter(scores))
    _draw_gains(axes, scores, range(*counts) if seeds is None else seeds, f"points above {first}")
    return finish(figure, title, *axes.get_legend_handles_labels())


def _gains(axes: Any, histories: Mapping[str, Sequence[History]]) -> None:
    """The gains of the last epoch."""
    scores = {method: [100 * run["accuracy"][-1] for run in runs] for method, runs in histories.items()}
    first = next(iter(histories))
    seeds = [run.get("seed", index) for index, run in enumerate(histories[first])]
    _draw_gains(axes, scores, seeds, f"points above {first},\nlast epoch")


def _draw_gains(axes: Any, scores: Mapping[str, Sequence[float]], seeds: Sequence[float], label: str) -> None:
    (first, plain), *others = scores.items()
    axes.axhline(0, color=styles(scores)[first].color, linewidth=1)
    for index, (method, values) in enumerate(others):
        style = styles(scores)[method]
        gains = [ours - base for ours, base in zip(values, plain, strict=True)]
        shift = 0.3 * ((index + 0.5) / len(others) - 0.5)  # equal gains stay visible
        axes.plot([float(seed) + shift for seed in seeds], gains, **style.of_points(), linestyle="", label=method)
        axes.axhline(statistics.fmean(gains), color=style.color, linestyle=style.line, linewidth=1)
    _finish(axes, "seed", label)


def _finish(axes: Any, x: str, y: str) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _band(runs: Sequence[History]) -> tuple[list[float], list[float], list[float]]:
    """Mean minus standard error, mean, mean plus standard error for every epoch, in percent."""
    columns = [[100 * value for value in column] for column in zip(*(run["accuracy"] for run in runs), strict=True)]
    means = [statistics.fmean(column) for column in columns]
    # Before Python 3.12 stdev fails on nan.
    known = [len(column) > 1 and math.isfinite(mean) for column, mean in zip(columns, means, strict=True)]
    errors = [statistics.stdev(c) / math.sqrt(len(c)) if k else 0.0 for c, k in zip(columns, known, strict=True)]
    pairs = list(zip(means, errors, strict=True))
    return [m - e for m, e in pairs], means, [m + e for m, e in pairs]


def _check(histories: Mapping[str, Sequence[History]]) -> None:
    lengths = {len(run["accuracy"]) for runs in histories.values() for run in runs}
    empty = [method for method, runs in histories.items() if not runs]
    if empty or len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"histories has runs of {sorted(lengths)} epochs and no runs for {empty}; it must hold at least one run "
            "for each method, all of the same length of at least 1"
        )
