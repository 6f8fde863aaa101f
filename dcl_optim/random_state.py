"""Random streams: the companion replays the draws of the model's forward and leaves the streams as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcl_optim.wrapper import is_torchs_own, parameters_of

RandomState = dict[torch.device, Tensor]


def capture(device: torch.device) -> RandomState:
    """Read the state of torch's generators that a forward on this device may draw from: the CPU's and its own.

    Examples:
        >>> state = capture(torch.device("cpu"))
        >>> first = torch.rand(3)
        >>> with replayed(state):
        ...     again = torch.rand(3)
        >>> torch.equal(first, again)
        True
    """
    state = {torch.device("cpu"): torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        state[device] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: RandomState) -> None:
    """Put generators back to a captured state."""
    for device, value in state.items():
        if device.type == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(device).set_rng_state(value, device)


def on_device(state: RandomState, device: torch.device | None) -> RandomState:
    """The same streams for a network on another device of the same kind, if it is on another."""
    if device is None or device in state:
        return state
    return {device if key.type == device.type else key: value for key, value in state.items()}


@contextmanager
def replayed(state: RandomState) -> Iterator[None]:
    """Draw from a captured state inside the block; afterwards the streams go on as if the block had not been."""
    now: RandomState = {}
    for device in state:
        now |= capture(device)
    try:
        restore(state)
        yield
    finally:
        restore(now)


@contextmanager
def kept(optimizer: Optimizer) -> Iterator[None]:
    """Put the streams back after the block, in which an optimizer steps."""
    trained = (parameter for parameter in parameters_of(optimizer) if parameter.requires_grad)
    state = {} if is_torchs_own(optimizer) else capture(next(trained).device)  # an empty slot may be on another device
    try:
        yield
    finally:
        restore(state)
