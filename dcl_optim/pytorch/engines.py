"""DeepSpeed's engine, which calls the model and steps the optimizer.

It may put its parameters in the place of the model's, steps each parameter group alone, and leaves out the step
of a batch whose gradient overflows. Not in algorithm.py, which knows no engine by name.
"""

from __future__ import annotations

import weakref
from typing import Any

from dcl_optim.pytorch.internals import frames_of

MODULE = "deepspeed.runtime.engine"


class Engine:
    """An engine that calls the model, and counts its steps, also those that it leaves out.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._num_steps = engine.global_steps

    def has_ended_step(self) -> bool:
        """Whether it has ended a step since it was asked last."""
        before = self._num_steps
        self._num_steps = getattr(self._engine(), "global_steps", before)
        return bool(self._num_steps != before)


def calling_engine() -> Engine | None:
    """The engine that is calling the model; None where the script does."""
    callers = (frame.f_locals.get("self") for frame in frames_of(MODULE))
    return next((Engine(caller) for caller in callers if hasattr(caller, "global_steps")), None)
