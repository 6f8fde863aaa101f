"""How far a long work has come: a bar, or lines where no bar can be drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["LINE_EVERY", "Lines", "progress_of"]

LINE_EVERY = 60.0  # seconds
# Shorter than tqdm's own, which leaves no room for the figures in 80 columns.
SHAPE = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{remaining}{postfix}]"


class Lines:
    """The progress as a line from time to time, on stderr."""

    def __init__(self, name: str, total: int, unit: str) -> None:
        self._name = name
        self._total = total
        self._unit = unit
        self._done = 0
        self._text = ""
        self._due = time.monotonic() + LINE_EVERY

    def set_postfix_str(self, text: str) -> None:
        """Note what to print behind the count."""
        self._text = text

    def update(self) -> None:
        """Count one, and print a line if the last one is old."""
        self._done += 1
        if (now := time.monotonic()) >= self._due:
            self._due = now + LINE_EVERY
            line = f"{self._name}: {self._done} of {self._total} {self._unit}, {self._text}"
            print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_of(name: str, total: int, unit: str) -> Iterator[Any]:
    """Give what counts a work: tqdm's bar on a terminal where tqdm is installed, else :class:`Lines`.

    Both have ``set_postfix_str`` and ``update``.
    """
    lines = Lines(name, total, unit)
    try:
        from tqdm import tqdm
    except ImportError:
        yield lines
        return
    with tqdm(total=total, bar_format=SHAPE, disable=None, leave=False, dynamic_ncols=True) as bar:
        yield lines if bar.disable else bar
