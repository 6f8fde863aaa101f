"""Who is calling: some of torch's own modules want another answer than scripts do, and have no other way to say so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def frames_of(module: str) -> Iterator[FrameType]:
    """The calls on the stack that run the code of a module, the innermost first.

    Examples:
        >>> next(frames_of("dcl_optim.callers")).f_code.co_name
        'frames_of'
        >>> any(frames_of("torch.utils.checkpoint"))
        False
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back
