"""Keeping Ctrl-C out of a step: both networks before it, or both after it."""

from __future__ import annotations

import importlib
import signal
import threading
from typing import Any

try:  # CPython's own functions: the public module wraps them in enumerations, which takes ten times as long
    _signals: Any = importlib.import_module("_signal")
except ImportError:
    _signals = signal


class postponed:
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

    def __enter__(self) -> None:
        self._arrived: list[tuple[int, Any]] = []
        is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
        self._handler: Any = _signals.getsignal(signal.SIGINT) if is_main else None
        if callable(self._handler):
            _signals.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._arrived.append((number, frame))
        if len(self._arrived) > 1:
            self._handler(number, frame)

    def __exit__(self, *exception: object) -> None:
        if callable(self._handler):
            _signals.signal(signal.SIGINT, self._handler)
            if len(self._arrived) == 1:
                self._handler(*self._arrived[0])
