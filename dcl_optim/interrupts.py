"""Keeping Ctrl-C out of a step: both networks before it, or both after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def postponed() -> Iterator[None]:
    """Hold an interrupt back until the block has ended; a second one goes through at once.

    Examples:
        >>> try:
        ...     with postponed():
        ...         signal.raise_signal(signal.SIGINT)
        ...         finished = True
        ... except KeyboardInterrupt:
        ...     print("interrupted afterwards:", finished)
        interrupted afterwards: True
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    arrived: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        arrived.append((number, frame))
        if len(arrived) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(arrived) == 1:
            handler(*arrived[0])
