"""RNG state: the companion replays the draws of the model's forward and leaves the generators as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy
import torch
from torch import Tensor

RngState = dict[torch.device, Tensor]
CPU = torch.device("cpu")


def capture(device: torch.device) -> RngState:
    """Read the state of the generators that a forward on this device may draw from: the CPU's and its own."""
    state = {CPU: torch.get_rng_state()}
    if device.type not in (CPU.type, "meta"):
        state[device] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: RngState) -> None:
    """Put generators back to a captured state."""
    for device, value in state.items():
        if device == CPU:
            torch.set_rng_state(value)
        else:
            torch.get_device_module(device).set_rng_state(value, device)


@contextmanager
def replayed(state: RngState) -> Iterator[None]:
    """Draw from a captured state inside the block; afterwards the generators go on as if the block had not been.

    Args:
        state: a forecaster's ``rng_state``; empty does nothing.

    Examples:
        >>> state, first = capture(torch.device("cpu")), torch.rand(3)
        >>> with replayed(state):
        ...     again = torch.rand(3)
        >>> torch.equal(first, again), torch.equal(first, torch.rand(3))
        (True, False)
    """
    now: RngState = {}
    for device in state:
        now[device] = torch.get_rng_state() if device == CPU else torch.get_device_module(device).get_rng_state(device)
    try:
        restore(state)
        yield
    finally:
        restore(now)


def unchanged(device: torch.device) -> ExitStack:
    """Give the generators back as they were after the block: torch's, and those of Python and NumPy."""
    stack = ExitStack()
    stack.enter_context(replayed(capture(device)))
    stack.callback(random.setstate, random.getstate())
    stack.callback(numpy.random.set_state, numpy.random.get_state())  # noqa: NPY002
    return stack
