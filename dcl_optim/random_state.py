"""Random streams: the companion replays the draws of the model's forward and leaves the streams as they were."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dcl_optim.wrapper import is_torchs_own, parameters_of

RandomState = dict[torch.device, Tensor]

# What these do inside; torch 2.6 has no overloads of theirs that take a generator.
FILLS = {"rand_like": Tensor.uniform_, "randn_like": Tensor.normal_, "randint_like": Tensor.random_}


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


class OwnDraws(TorchDispatchMode):
    """Inside the block, in this thread, random numbers come from a given generator and the default one stays untouched.

    What another thread draws from the default generator meanwhile is then not mixed up with what is drawn here. The
    numbers are those that the default generator would give from the same state.

    Examples:
        >>> state = torch.get_rng_state()
        >>> first = torch.nn.functional.dropout(torch.ones(8))
        >>> generator = torch.Generator()
        >>> _ = generator.set_state(state)
        >>> with OwnDraws(generator):
        ...     again = torch.nn.functional.dropout(torch.ones(8))
        >>> torch.equal(first, again)
        True
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs)
        if draws and kwargs.get("generator") is None:
            func, kwargs = _with_generator(func), kwargs | {"generator": self._generator}
        return func(*args, **kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is attention without dropout, which draws nothing."""
    given = dict(zip(_names(func), args, strict=False)) | kwargs
    return "dropout_p" in _names(func) and given.get("dropout_p", 0.0) == 0.0


@functools.cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload of a random function that takes a generator, with the same arguments otherwise."""
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    for overload in overloads:
        if set(_names(overload)) == {*_names(func), "generator"}:
            return overload
    if func.overloadpacket.__name__ in FILLS:
        return functools.partial(_filled, FILLS[func.overloadpacket.__name__])
    raise RuntimeError(
        f"overlap=True cannot replay {func}, which takes no generator, beside the model; pass overlap=False"
    )


def _filled(fill: Any, like: Tensor, *bounds: int, generator: torch.Generator, **options: Any) -> Tensor:
    drawn: Tensor = fill(torch.empty_like(like, **options), *bounds, generator=generator)
    return drawn
