"""What can be run, in words: the tables, and the rows with their settings, the paper's numbers and the hours."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from examples.research.paper import estimate, tables
from examples.research.paper.recipes import Recipe
from examples.research.paper.rows import Row, Table, Work
from examples.research.paper.session import Session

PROGRAM = "python -m examples.paper"


def overview() -> str:
    """A line for each table."""
    width = max(map(len, tables.NAMES))
    lines = [
        f"{PROGRAM} TABLE [ROW ...] trains the rows of a table of the paper and prints it with the paper's numbers:"
    ]
    for name, table in tables.build(Recipe()).items():
        lines.append(f"  {name:<{width}}  {table.place}: {table.title} ({len(table.rows)} rows)")
    lines += [
        f"{PROGRAM} TABLE --list: its rows, their settings, the paper's numbers, hours on this machine",
        f"{PROGRAM} TABLE --smoke: two steps of each row, on your data",
        "--help: all options; docs/reproduce.md: where the data belong",
    ]
    return "\n".join(lines)


def rows_of(known: Mapping[str, Table], chosen: Mapping[str, Sequence[Row]], session: Session) -> str:
    """A line for each row: its name, the paper's number, the hours of a seed on this machine, its settings."""
    shown: dict[str, str] = {}
    parts = []
    for name, rows in chosen.items():
        lines = [f"{name} ({known[name].place}): {known[name].title}"]
        width = max(len(row.name) for row in rows)
        for row in rows:
            if sys.stderr.isatty():
                print(f"timing {name} {row.name}", end="\033[K\r", file=sys.stderr)
            key, place = row.work.key(0), f"{name} {row.name}"
            time = f"{estimate.hours(row.work, session):8.1f} h"
            same = f", the run of {shown[key]}" if key in shown else ""
            shown.setdefault(key, place)
            lines.append(f"  {row.name:<{width}}  {_paper(row):>12}  {time}  {settings(row.work)}{same}")
        for work in {row.work.needs.key(0): row.work.needs for row in rows if row.work.needs}.values():
            if work.key(0) not in shown:
                lines.append(f"  before these, once: {estimate.hours(work, session):.1f} h  {settings(work)}")
                shown[work.key(0)] = name
        parts.append("\n".join([*lines, *([f"  {known[name].remark}"] if known[name].remark else [])]))
    of = f"of one seed on {estimate.machine(session)}, from timed steps, without loading images"
    return "\n\n".join([*parts, f"Hours: {of}. A line: {PROGRAM} TABLE ROW. Without a row:", *tables.WITHOUT])


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
