"""What can be run, in words: the tables, and the rows with their settings, the paper's numbers and the time."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence

from examples.research.paper import estimate, tables
from examples.research.paper.loop import duration
from examples.research.paper.recipes import Recipe
from examples.research.paper.rows import Row, Table, Work
from examples.research.paper.session import Session

PROGRAM = "python -m examples.paper"
WIDTH = 120  # of a remark


def overview() -> str:
    """A line for each table."""
    width = max(map(len, tables.NAMES))
    lines = [
        f"{PROGRAM} TABLE [ROW ...] trains the rows of a table of the paper and prints it with the paper's numbers:"
    ]
    for name, table in tables.build(Recipe()).items():
        lines.append(f"  {name:<{width}}  {table.place}: {table.title} ({len(table.rows)} rows)")
    lines += [
        f"{PROGRAM} TABLE --list: its rows, their settings, the paper's numbers",
        f"{PROGRAM} TABLE --hours: also the time of each on this machine",
        f"{PROGRAM} TABLE --smoke: two steps of each row, on your data",
        "--help: all options; docs/reproduce.md: where the data belong",
    ]
    return "\n".join(lines)


def rows_of(known: Mapping[str, Table], chosen: Mapping[str, Sequence[Row]], session: Session | None = None) -> str:
    """A line for each row: its name, the paper's number, its settings; with a session the time of a seed there."""
    shown: dict[str, str] = {}
    parts = []
    for name, rows in chosen.items():
        lines = [f"{name} ({known[name].place}): {known[name].title}"]
        width = max(len(row.name) for row in rows)
        for row in rows:
            if session and sys.stderr.isatty():
                print(f"timing {name} {row.name}", end="\033[K\r", file=sys.stderr)
            key, place = row.work.key(0), f"{name} {row.name}"
            time = _time(row.work, session)
            same = f", the run of {shown[key]}" if key in shown else ""
            shown.setdefault(key, place)
            lines.append(f"  {row.name:<{width}}  {_paper(row):>12}  {time}{settings(row.work)}{same}")
        for work in {row.work.needs.key(0): row.work.needs for row in rows if row.work.needs}.values():
            if work.key(0) not in shown:
                lines.append(f"  before these, once: {_time(work, session)}{settings(work)}")
                shown[work.key(0)] = name
        parts.append("\n".join([*lines, *_wrapped(known[name].remark)]))
    said = f"A line: {PROGRAM} TABLE ROW. Without a row:"
    if session:
        said = f"Times: of one seed on {estimate.machine(session)}, from timed steps, without loading images. {said}"
    return "\n\n".join([*parts, said, *tables.WITHOUT])


def _wrapped(remark: str) -> list[str]:
    return textwrap.wrap(remark, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _time(work: Work, session: Session | None) -> str:
    return f"{duration(3600 * estimate.hours(work, session)):>10}  " if session else ""


def _paper(row: Row) -> str:
    if row.paper is None:
        return "figure"
    return f"{row.paper}" + (f" ± {row.error}" if row.error else "")


def settings(work: Work) -> str:
    """A training in a line."""
    chosen = work.configuration
    kind = chosen.method if work.task == "classify" else f"{work.task} {chosen.method}"
    given = {**work.details, **chosen.options}
    options = " ".join(f"{name}={value}" for name, value in given.items())
    start = ", from ImageNet's weights" if work.pretrained else ""
    optimizer = f"{chosen.optimizer} {chosen.lr:g}, decay {chosen.weight_decay:g}"
    recipe = f"{chosen.epochs} epochs of {chosen.batch_size}, {optimizer}"
    method = f"{kind} {options}".strip()
    return f"{chosen.network} on {chosen.data}, {method}, {recipe}, {chosen.augmentation}{start}"
