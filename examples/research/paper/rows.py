"""What a table is made of: its numbers, and the training behind each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.research.configuration import Configuration
from examples.research.records import fingerprint


@dataclass(frozen=True)
class Work:
    """One training, but for its seed; tables that show the same one share it.

    Attributes:
        configuration: data, network, method and recipe.
        task: a key of :data:`examples.research.paper.tasks.TASKS`.
        details: the task's own settings.
        pretrained: start from torchvision's ImageNet weights.
        needs: a training whose network this one starts from or is taught by; that of seed 0 is taken.
    """

    configuration: Configuration
    task: str = "classify"
    details: Mapping[str, Any] = field(default_factory=dict)
    pretrained: bool = False
    needs: Work | None = None

    def as_dict(self) -> dict[str, Any]:
        """The training in types that JSON knows."""
        return {
            "configuration": self.configuration.as_dict(),
            "task": self.task,
            "details": dict(self.details),
            "pretrained": self.pretrained,
            "needs": self.needs.as_dict() if self.needs else None,
        }

    def key(self, seed: int) -> str:
        """A name for the run of a seed: it differs where anything differs."""
        return fingerprint(self.as_dict() | {"seed": seed})


@dataclass(frozen=True)
class Row:
    """One number of a table.

    Attributes:
        line: of the table.
        column: of the table.
        work: what makes the number.
        paper: the paper's, in per cent; None where it has a figure only.
        error: the paper's standard error; None where it gives none, or only a bound.
        companion: the paper's accuracy of the companion.
    """

    line: str
    column: str
    work: Work
    paper: float | None = None
    error: float | None = None
    companion: float | None = None

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return f"{_slug(self.line)}/{_slug(self.column)}"

    def is_meant(self, name: str) -> bool:
        """Whether this is its name, or how it begins up to a slash; also with the column first."""
        column_first = f"{_slug(self.column)}/{_slug(self.line)}"
        return any(f"{one}/".startswith(f"{name}/") for one in (self.name, column_first))


@dataclass(frozen=True)
class Table:
    """A table or a figure of the paper.

    Attributes:
        title: one line.
        place: its number in the paper.
        rows: its numbers.
        remark: where the paper leaves a setting open, or contradicts itself.
    """

    title: str
    place: str
    rows: Sequence[Row]
    remark: str = ""


def select(table: Table, names: Sequence[str], others: Mapping[str, Table] | None = None) -> list[Row]:
    """The rows that are meant by these names; all for no name.

    Raises:
        ValueError: a name is of no row; the message has those of ``others`` that know it.
    """
    if not names:
        return list(table.rows)
    for name in names:
        if not any(row.is_meant(name) for row in table.rows):
            elsewhere = [key for key, other in (others or {}).items() if any(row.is_meant(name) for row in other.rows)]
            if elsewhere:
                raise ValueError(f"row {name!r} is of another table: {', '.join(elsewhere)}")
            known = [row.name for row in table.rows]
            near = difflib.get_close_matches(name, [*known, *(one.partition("/")[0] for one in known)]) or known
            raise ValueError(f"row {name!r} is unknown; choose from {', '.join(dict.fromkeys(near))}")
    return [row for row in table.rows if any(row.is_meant(name) for name in names)]


def works(rows: Iterable[Row]) -> list[Work]:
    """The trainings of some rows, each once, and before each what it needs."""
    found: dict[str, Work] = {}
    for row in rows:
        for work in (row.work.needs, row.work):
            if work is not None:
                found.setdefault(work.key(0), work)
    return list(found.values())


def _slug(text: str) -> str:
    return "-".join("".join(letter if letter.isalnum() or letter == "." else " " for letter in text.lower()).split())
