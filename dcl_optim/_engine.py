"""DeepSpeed's engine, which calls the model and steps the wrapper; algorithm.py knows no engine by name."""

from __future__ import annotations

import weakref
from typing import Any

from dcl_optim._torch import frames_of


class Engine:
    """The engine that calls the model. It leaves out the step of a batch whose gradient overflows, and calls nothing.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._num_skipped = engine.skipped_steps

    def has_skipped(self) -> bool:
        """Whether it has left out a step since it was asked last."""
        before = self._num_skipped
        self._num_skipped = getattr(self._engine(), "skipped_steps", before)
        return bool(self._num_skipped != before)


def calling_engine() -> Engine | None:
    """The engine that is calling the model; None where the script does."""
    callers = (frame.f_locals.get("self") for frame in frames_of("deepspeed.runtime.engine"))
    return next((Engine(caller) for caller in callers if hasattr(caller, "skipped_steps")), None)
