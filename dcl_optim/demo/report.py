"""The demo's numbers in a table and in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcl_optim.trial.memory import readable
from dcl_optim.trial.paired import mean_and_error, plus_minus, probability
from dcl_optim.trial.text import aligned


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


def format_table(rows: Sequence[Row]) -> str:
    """Format the rows for a terminal."""
    head = ("method", "accuracy", "minus plain", "time/epoch", "params", "state")
    body = [
        (
            row.method,
            f"{plus_minus(row.accuracy, row.accuracy_error)} %",
            ""
            if row.method == "plain" or row.minus_plain is None
            else plus_minus(row.minus_plain, row.minus_plain_error, sign="+"),
            f"{row.relative_time:.2f} x",
            f"+{row.parameters_added:,}",
            f"+{readable(row.bytes_added)}",
        )
        for row in rows
    ]
    return aligned(head, body)


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
        return f"{row.method} is within noise: {points} (t-test, p >= 0.05)."
    return f"{row.method} {'gains' if row.minus_plain > 0 else 'loses'} {points} against plain (t-test, p < 0.05)."
