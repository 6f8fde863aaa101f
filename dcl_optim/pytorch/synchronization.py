"""The one answer to "may a value be read here?": reading one makes the host wait for an accelerator."""

from __future__ import annotations

from torch import Tensor

SYNC_INTERVAL = 100  # steps


def may_sync(step: int, tensor: Tensor) -> bool:
    """Whether a step (from 1; 0 for none) may read values of a tensor: always on a CPU, else if it is a sync step."""
    return tensor.is_cpu or is_sync_step(step)


def is_sync_step(step: int) -> bool:
    """Whether a step is one of 1, 2, 4, 8, ... and 100, 200, ..."""
    return step > 0 and (step % SYNC_INTERVAL == 0 or step & (step - 1) == 0)
