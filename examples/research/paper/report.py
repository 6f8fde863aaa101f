"""A table in the paper's form: its numbers beside ours, with standard errors over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dcl_optim.trial.paired import mean_and_error, plus_minus
from examples.research.paper.rows import Row, Table

Records = Mapping[str, Sequence[Mapping[str, Any]]]  # of each training's key of seed 0
BEYOND = 2.0  # standard errors of the difference
LEGEND = (
    "Ours: mean ± standard error over the seeds, in per cent of the test images after the last epoch; (paper's ± its "
    f"standard error where it gives one). `!` marks a difference of more than {BEYOND:g} standard errors of both."
)


def table(shown: Table, records: Records) -> str:
    """The lines and columns that have results, of the model and, where it has some, of the companion."""
    parts = [_grid(shown.rows, records, _deployed), _grid(shown.rows, records, _companion), _others(shown, records)]
    if not parts[0]:
        return ""
    titles = (f"{shown.place}: {shown.title}", "The companion ω", "The model on the training images")
    body = [f"{title}\n\n{part}" for title, part in zip(titles, parts, strict=True) if part]
    return "\n\n".join([*body, LEGEND, *([shown.remark] if shown.remark else [])])


def _deployed(row: Row, record: Mapping[str, Any]) -> float | None:
    return next((100 * value for value in record["accuracy"].values()), None)


def _companion(row: Row, record: Mapping[str, Any]) -> float | None:
    found = record["accuracy"].get("companion")
    return None if found is None else 100 * found


def _grid(rows: Sequence[Row], records: Records, value: Any) -> str:
    cells = {(row.line, row.column): _cell(row, records, value) for row in rows}
    cells = {place: text for place, text in cells.items() if text}
    if not cells:
        return ""
    columns = [column for column in dict.fromkeys(row.column for row in rows) if column in {c for _, c in cells}]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for line in dict.fromkeys(line for line, _ in cells):
        found = (cells.get((line, column), "") for column in columns)
        lines += [f"| {line} | {' | '.join(found)} |"]
    return "\n".join(lines)


def _cell(row: Row, records: Records, value: Any) -> str:
    found = [value(row, record) for record in records.get(row.work.key(0), ())]
    found = [one for one in found if one is not None]
    if not found:
        return ""
    mean, error = mean_and_error(found)
    paper, of_paper = (row.companion, None) if value is _companion else (row.paper, row.error)
    text = plus_minus(mean, error)
    if paper is not None:
        text += f" ({paper}{f' ± {of_paper}' if of_paper else ''}){_mark(mean - paper, error, of_paper)}"
    return text


def _mark(difference: float, error: float | None, of_paper: float | None) -> str:
    """Where the difference is beyond both errors; one seed has none."""
    if error is None:
        return ""
    return " !" if abs(difference) > BEYOND * math.hypot(error, of_paper or 0.0) else ""


def _others(shown: Table, records: Records) -> str:
    """Consistency and perplexity, which the figures' rows have."""
    if any(row.paper is not None for row in shown.rows):
        return ""
    lines = ["| | consistency | perplexity |", "|---|--:|--:|"]
    for row in shown.rows:
        found = [r for r in records.get(row.work.key(0), ()) if "perplexity" in r]
        if found:
            numbers = (plus_minus(*mean_and_error([r[key] for r in found])) for key in ("consistency", "perplexity"))
            lines.append(f"| {row.line}, {row.column} | {' | '.join(numbers)} |")
    return "\n".join(lines) if len(lines) > 2 else ""
