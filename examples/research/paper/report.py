"""A table in the paper's form: its numbers beside ours, and what each method gains on the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dcl_optim.trial.paired import mean_and_error, plus_minus
from examples.research.paper.rows import Row, Table, Work

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]  # of each training's key of seed 0
INSIDE = 0.95  # of the t distribution
LEGEND = (
    "Ours: mean ± standard error over n seeds, in per cent of the test images after the last epoch; paper: its number, "
    "± its standard error where it gives one; else it is taken as exact. `!`: apart by more than the 95 % interval of "
    "Student's t with n - 1 degrees of freedom, as one of 20 is by chance. One seed has no error: nothing is marked."
)
GAINS = "Minus plain training, on the same seeds; in brackets the 95 % interval of Student's t with n - 1 degrees"


def table(shown: Table, records: Records) -> str:
    """The lines and columns that have results, of the model and, where it has some, of the companion."""
    parts = {
        f"{shown.place}: {shown.title}": _grid(shown.rows, records, _deployed),
        "The companion ω": _grid(shown.rows, records, _companion),
        "The model on the training images": _others(shown, records),
        GAINS: "\n".join(_gains(shown.rows, records)),
    }
    body = [f"{title}\n\n{part}" for title, part in parts.items() if part]
    return "\n\n".join([*body, LEGEND, *([shown.remark] if shown.remark else [])]) if body else ""


def _deployed(record: Record) -> float | None:
    return next((100 * value for value in record["accuracy"].values()), None)


def _companion(record: Record) -> float | None:
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
    made = records.get(row.work.key(0), ())
    found = [value(record) for record in made]
    found = [one for one in found if one is not None]
    parts = []
    if found:
        mean, error = mean_and_error(found)
        paper, of_paper = (row.companion, None) if value is _companion else (row.paper, row.error)
        parts.append(_mean(found))
        if paper is not None:
            mark = " !" if _is_apart(mean - paper, error, len(found), of_paper) else ""
            parts.append(f"paper {paper}{f' ± {of_paper}' if of_paper else ''}{mark}")
    if value is _deployed:
        parts += [f"seed {record['seed']} diverged in epoch {record['diverged']}" for record in _diverged(made)]
        if row.work.needs is not None and not made:
            needed = _diverged(records.get(row.work.needs.key(0), ()))
            parts += [f"what it begins with diverged in epoch {record['diverged']}" for record in needed]
    return "; ".join(parts)


def _mean(values: Sequence[float]) -> str:
    return f"{plus_minus(*mean_and_error(values))}, n = {len(values)}"


def _diverged(made: Sequence[Record]) -> list[Record]:
    return [record for record in made if "diverged" in record]


def _limit(runs: int) -> float:
    """How many standard errors of the mean of so many runs the true mean may be away."""
    from scipy.special import stdtrit  # Student's quantile

    return float(stdtrit(runs - 1, (1 + INSIDE) / 2))


def _is_apart(difference: float, error: float | None, runs: int, of_paper: float | None) -> bool:
    if error is None:
        return False
    return abs(difference) > _limit(runs) * math.hypot(error, of_paper or 0.0)


def _gains(rows: Sequence[Row], records: Records) -> list[str]:
    """A line for each row whose plain training is in the table, too."""
    plain = {row.work.key(0): row for row in rows}
    lines = []
    for row in rows:
        base = plain.get(_plain(row.work).key(0))
        if base is not None and base is not row:
            lines += _gain(row, base, records)
    return lines


def _plain(work: Work) -> Work:
    """The same training, and what it begins with, by cross-entropy or the task's own loss alone."""
    needs = None if work.needs is None else _plain(work.needs)
    return replace(work, configuration=replace(work.configuration, method="plain", options={}), needs=needs)


def _gain(row: Row, base: Row, records: Records) -> list[str]:
    ours, theirs = (_by_seed(records.get(one.work.key(0), ())) for one in (row, base))
    found = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not found:
        return []
    mean, error = mean_and_error(found)
    line = f"{_names(row, base)} = {plus_minus(mean, error, sign='+')}"
    if error is not None:
        width = _limit(len(found)) * error
        line += f" ({mean - width:+.2f} to {mean + width:+.2f})"
    line += f" in {len(found)} paired seed{'s' if len(found) > 1 else ''}"
    if row.paper is None or base.paper is None:
        return [line]
    paper = row.paper - base.paper
    of_paper = math.hypot(row.error, base.error) if row.error and base.error else None
    mark = " !" if _is_apart(mean - paper, error, len(found), of_paper) else ""
    return [f"{line}; the paper {paper:.1f}{mark}"]


def _by_seed(made: Sequence[Record]) -> dict[int, float]:
    values = {record["seed"]: _deployed(record) for record in made}
    return {seed: value for seed, value in values.items() if value is not None}


def _names(row: Row, base: Row) -> str:
    if row.line == base.line:
        return f"{row.line}: {row.column} - {base.column}"
    if row.column == base.column:
        return f"{row.column}: {row.line} - {base.line}"
    return f"{row.line}, {row.column} - {base.line}, {base.column}"


def _others(shown: Table, records: Records) -> str:
    """Consistency and perplexity, which the figures' rows have."""
    if any(row.paper is not None for row in shown.rows):
        return ""
    lines = ["| | consistency | perplexity |", "|---|--:|--:|"]
    for row in shown.rows:
        found = [r for r in records.get(row.work.key(0), ()) if "perplexity" in r]
        if found:
            cells = (_mean([record[key] for record in found]) for key in ("consistency", "perplexity"))
            lines.append(f"| {row.line}, {row.column} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""
