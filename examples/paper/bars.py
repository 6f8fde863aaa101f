"""Bars of the top non-target classes: their shares in one class, their perplexity over all classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcl_optim.metrics import non_target_distribution, non_target_perplexity
from dcl_optim.plots.canvas import COLOURS, finish, new_figure
from examples.paper.inputs import Logits, by_method, classes_shown, names_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, MOST = 25, 100  # perplexity bars: classes in a column, classes in a figure


def top_non_target_histogram(
    logits: Logits,
    labels: Tensor,
    class_index: int,
    class_names: Sequence[str] | None = None,
    *,
    most: int = 8,
    title: str | None = None,
) -> Figure:
    r"""Draw the shares :math:`p(k|c)` of one class's samples by top non-target class, methods side by side.

    The classes with the largest shares, averaged over the methods, are shown from the largest on; the last bar holds
    the rest.

    Args:
        logits: floating point, (N, K), or such a tensor for each method, at most six; the paper takes the training
            and the test set.
        labels: integer classes in 0..K-1, (N,).
        class_index: the class c.
        class_names: K names. Default: the classes' numbers.
        most: how many classes are shown, at least 1. Default: 8.
        title: the line above. Default: names the class and its number of samples.

    Returns:
        The figure; its ``savefig("histogram.png")`` writes it, the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: the arguments are not those, or the class has no sample.
        ImportError: matplotlib is missing.

    Source: Section 3.4 and Figure 2 (c).
    """
    if most < 1:
        raise ValueError(f"most is {most}; it must be at least 1")
    methods, labels = _methods(logits, labels)
    count = next(iter(methods.values())).shape[1]
    names, samples = names_of(count, class_names), int((labels == class_index).sum())
    if samples == 0:
        raise ValueError(f"class_index is {class_index}; it must be one of the classes in labels, which has no sample")
    shares = torch.stack([100 * non_target_distribution(z, labels)[class_index] for z in methods.values()])
    order = shares.mean(0).argsort(descending=True, stable=True)
    order = order[shares.mean(0)[order] > 0]
    shown, rest = order[:most], order[most:]
    bars, ticks = shares[:, shown], [names[k] for k in shown.tolist()]
    if len(rest):
        bars = torch.cat([bars, shares[:, rest].sum(1, keepdim=True)], 1)
        ticks.append(f"{len(rest)} other" + ("s" if len(rest) > 1 else ""))
    figure = new_figure(7, 1.4 + len(ticks) * _thickness(len(methods)))
    axes = figure.subplots()
    _draw_bars(axes, bars.tolist(), ticks)
    axes.set_ylabel("top non-target class")
    axes.set_xlabel("share of samples [%]")
    heading = f"Class {names[class_index]}: {samples} samples by top non-target class"
    return finish(figure, title or heading, axes.containers, list(methods))


def perplexity_bars(
    logits: Logits,
    labels: Tensor,
    class_names: Sequence[str] | None = None,
    *,
    classes: Sequence[int] | None = None,
    title: str | None = None,
) -> Figure:
    r"""Draw the non-target perplexity of each class, :math:`PP_c`, methods side by side; lower is more consistent.

    Classes are sorted by the first method, the largest on top. Up to 25 classes, the most and (in green) the second
    most frequent top non-target class are written next to each bar; more classes are laid out in columns without them.

    Args:
        logits: floating point, (N, K), or such a tensor for each method, at most six.
        labels: integer classes in 0..K-1, (N,).
        class_names: K names. Default: the classes' numbers.
        classes: the classes shown; the paper draws 20 of 100. Default: all that have samples, or of more than 100 of
            them 100 at random, the same every time. The means in the legend are over the classes shown.
        title: the line above. Default: how many classes are shown.

    Returns:
        The figure; its ``savefig("perplexity.png")`` writes it, the suffix chooses the format (.png, .pdf, .svg).

    Raises:
        ValueError: the arguments are not those, or a class has no sample.
        ImportError: matplotlib is missing.

    Source: Section 3.4 and Figure 3.
    """
    methods, labels = _methods(logits, labels)
    count = next(iter(methods.values())).shape[1]
    names, shown = names_of(count, class_names), classes_shown(classes, labels, count, MOST)
    perplexity = {method: non_target_perplexity(z, labels) for method, z in methods.items()}
    first = next(iter(perplexity.values()))
    shown.sort(key=lambda c: first[c].item(), reverse=True)
    columns = math.ceil(len(shown) / COLUMN)
    rows = math.ceil(len(shown) / columns)
    slot = _thickness(len(methods)) * (1 if columns == 1 else 0.55)
    figure = new_figure(8 if columns == 1 else 3.2 * columns, 1.4 + rows * slot)
    panels = figure.subplots(1, columns, sharex=True, squeeze=False)[0]
    for index, axes in enumerate(panels):
        part = shown[index * rows : (index + 1) * rows]
        _draw_bars(axes, [values[part].tolist() for values in perplexity.values()], [names[c] for c in part])
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xlabel("non-target perplexity")
    if columns == 1:
        _name_top_two(panels[0], [non_target_distribution(z, labels)[shown] for z in methods.values()], names)
    panels[0].set_ylabel("class")
    means = [f"{method}, mean {values[shown].mean():.2f}".lstrip(", ") for method, values in perplexity.items()]
    return finish(figure, title or f"Non-target perplexity of {len(shown)} classes", panels[0].containers, means)


def _methods(logits: Logits, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    if isinstance(logits, Mapping) and len(logits) > len(COLOURS):
        raise ValueError(f"logits has {len(logits)} methods; it must have at most {len(COLOURS)}, one for each colour")
    return by_method("logits", logits, labels)


def _thickness(methods: int) -> float:
    """Height in inches of one class's group of bars."""
    return 0.14 * methods + 0.1


def _draw_bars(axes: Any, values: Sequence[Sequence[float]], ticks: Sequence[str]) -> None:
    """Draw a group of horizontal bars for each tick, the first group on top."""
    width = 0.8 / len(values)
    for index, lengths in enumerate(values):
        places = [row - 0.4 + (index + 0.5) * width for row in range(len(ticks))]
        axes.barh(places, lengths, width, color=COLOURS[index])
    axes.set_yticks(range(len(ticks)), ticks)
    axes.set_ylim(len(ticks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelsize="small")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _name_top_two(axes: Any, shares: Sequence[Tensor], names: Sequence[str]) -> None:
    """Write each bar's most and second most frequent top non-target class next to it."""
    for container, distribution in zip(axes.containers, shares, strict=True):
        for bar, row in zip(container, distribution, strict=True):
            best = row.argsort(descending=True, stable=True)[:2].tolist()
            style = {"textcoords": "offset points", "va": "center", "fontsize": "x-small"}
            end = (bar.get_width(), bar.get_y() + bar.get_height() / 2)
            text = axes.annotate(names[best[0]], end, (3, 0), **style)
            if row[best[1]] > 0:
                axes.annotate(names[best[1]], (1, 0.5), (4, 0), xycoords=text, color=COLOURS[3], **style)
