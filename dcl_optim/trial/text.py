"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Write rows of cells in columns under a head and a rule: the first column to the left, the others to the right.

    Examples:
        >>> print(aligned(["way", "ms"], [["plain", "1.5"], ["DCP", "12"]]))
        way     ms
        ----------
        plain  1.5
        DCP     12
    """
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = []
    for line in (head, *body):
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])
