"""The demo's numbers in a table and in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One method's line of the table; accuracies in percent, ``minus_plain`` paired over the seeds."""

    method: str
    accuracy: float
    accuracy_error: float | None
    minus_plain: float | None  # None if this method or plain training diverged
    minus_plain_error: float | None
    relative_time: float
    parameters_added: int
    bytes_added: int
    diverged: int = 0  # seeds


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Compute the mean and its standard error, which is None for a single value.

    Examples:
        >>> mean_and_error([1.0, 2.0, 3.0])
        (2.0, 0.577...)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def plus_minus(mean: float, error: float | None, sign: str = "", places: int = 2) -> str:
    """Format a mean and its standard error; differences take the sign "+".

    Examples:
        >>> plus_minus(0.5, 0.25, sign="+")
        '+0.50 ± 0.25'
    """
    return f"{mean:{sign}.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def summarise(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Compute the table's rows from the last epoch of every run."""
    final = {method: [100 * run["accuracy"][-1] for run in runs] for method, runs in histories.items()}
    seconds = {m: statistics.median(t for run in runs for t in run["seconds"]) for m, runs in histories.items()}
    diverged = {m: sum(run["diverged"] for run in runs) for m, runs in histories.items()}
    rows = []
    for method, runs in histories.items():
        differences = [ours - plain for ours, plain in zip(final[method], final["plain"], strict=True)]
        minus_plain: tuple[float | None, float | None] = (None, None)
        if not (diverged[method] or diverged["plain"]):
            minus_plain = mean_and_error(differences)
        rows.append(
            Row(
                method,
                *mean_and_error(final[method]),
                *minus_plain,
                seconds[method] / seconds["plain"],
                runs[0]["parameters_added"],
                runs[0]["bytes_added"],
                diverged[method],
            )
        )
    return rows


def format_table(rows: Sequence[Row], split: str) -> str:
    """Format the rows for a terminal."""
    head = ("method", f"{split} accuracy", "minus plain", "time/epoch", "parameters", "state memory")
    body = [
        (
            row.method,
            f"{plus_minus(row.accuracy, row.accuracy_error)} %",
            ""
            if row.method == "plain" or row.minus_plain is None
            else plus_minus(row.minus_plain, row.minus_plain_error, sign="+"),
            f"{row.relative_time:.2f} x",
            f"+{row.parameters_added:,}",
            f"+{_size(row.bytes_added)}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "  ".join(f"{cell:>{w}}" if i else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in (head, *body)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def probability(mean: float, error: float, runs: int) -> float:
    """Compute the two-sided p of a paired t-test from the mean of the differences and its standard error.

    Examples:
        >>> round(probability(2.262, 1.0, runs=10), 3)
        0.05
    """
    from scipy.special import stdtr  # scikit-learn needs scipy too

    if error == 0 or runs < 2:
        return float(mean == 0 or runs < 2)
    return float(2.0 * stdtr(runs - 1, -abs(mean) / error))


def verdict(row: Row, seeds: int) -> str:
    """Say in 80 columns whether a method gained on plain training by a t-test over the seeds, or that it diverged."""
    if row.diverged:
        return f"{row.method} diverged in {row.diverged} of {seeds} seeds: its loss or logits are not finite."
    if row.minus_plain is None:
        return f"{row.method} is not compared with plain, which diverged."
    if row.minus_plain_error is None:
        return f"{row.method}: {row.minus_plain:+.2f} points against plain in one seed, which says nothing of noise."
    points = f"{plus_minus(row.minus_plain, row.minus_plain_error, sign='+')} points"
    if probability(row.minus_plain, row.minus_plain_error, seeds) >= 0.05:
        return f"{row.method} is within noise of plain: {points} (t-test: p >= 0.05)."
    return f"{row.method} {'gains' if row.minus_plain > 0 else 'loses'} {points} against plain (t-test: p < 0.05)."
