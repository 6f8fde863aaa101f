"""Running a second network as the model ran: on its arguments out of their graph, with the same random draws."""

from __future__ import annotations

import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dcl_optim.pytorch.internals import flatten_tree, unflatten_tree

CPU = torch.device("cpu")
THREADS = (
    "two threads call the model for training at once: a companion follows one.\n"
    "  Fix: give each thread another model and optimizer, or hold a lock from the forward pass to the step"
)


class Arguments(NamedTuple):
    """What a network is called with, flattened: a step copies and cuts the leaves, and nests them once.

    Attributes:
        leaves: tensors, and whatever else is no container that torch's pytree knows.
        structure: how they are nested.
        names: the number of positional arguments, and the names of the others.
    """

    leaves: list[Any]
    structure: Any
    names: tuple[Any, ...]

    def copied(self) -> Arguments:
        """Copy what a network may write to: tensors, out of their graph, and of other objects the outermost."""
        # Still in need of a gradient: a reentrant checkpoint inside the companion would skip its block without one. But
        # no leaf, which the companion's forward could not write to.
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad).clone() if isinstance(leaf, Tensor) else _shallow(leaf)
            for leaf in self.leaves
        ]
        return Arguments(leaves, self.structure, self.names)


class Replay:
    """Keeps the model's arguments, detached, and the RNG state that it draws from; then calls another network.

    The arguments are cloned: a model may write to them, and a script may refill them before its backward pass. Of an
    object that torch's pytree does not know there is a shallow copy.

    Examples:
        >>> model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
        >>> replay, x = Replay(), torch.ones(8, 2)
        >>> replay.before_forward((x,), {}, x.device)
        >>> z = model(x)
        >>> torch.equal(z, replay.call(model, replay.arguments((x,), {})))
        True
    """

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        """Keep arguments and RNG state of the forward pass that begins, on this device."""
        self._given = args, kwargs
        self._thread = threading.get_ident()
        self._arguments: Any = _flattened(args, kwargs).copied()
        self._device = device
        self._rng_states = [torch.get_rng_state()]
        if device != CPU:
            self._rng_states.append(torch.get_device_module(device).get_rng_state(device))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments as the model got them, after its forward pass; ``args`` and ``kwargs`` are what it has now."""
        if self._thread != threading.get_ident():
            raise RuntimeError(THREADS)
        arguments: Arguments = self._arguments
        self._arguments = None
        if self._given[0] is not args or self._given[1] is not kwargs:  # a later pre-hook has put others in their place
            return _flattened(args, kwargs).copied()
        return arguments

    def call(self, network: nn.Module, arguments: Arguments) -> Any:
        """Call a network with the random draws of the forward pass whose arguments were asked for."""
        hooks: AbstractContextManager[Any] = nullcontext()
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks("none are to be active"):
                pass
        except RuntimeError:  # some are, as those of a non-reentrant checkpoint, which does not run this network again
            # Detached, a saved output does not hold the graph that holds it.
            hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
        args, kwargs = unflatten_tree(arguments.leaves, arguments.structure)
        with forked_rng(self._device), hooks:
            of_cpu, *of_device = self._rng_states
            torch.set_rng_state(of_cpu)
            for state in of_device:
                torch.get_device_module(self._device).set_rng_state(state, self._device)
            return network(*args, **kwargs)


def forked_rng(device: torch.device) -> AbstractContextManager[Any]:
    """Give the generators that may draw on this device, the CPU's and its own, back as they were.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> with forked_rng(CPU):
        ...     first = torch.rand(3)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    return torch.random.fork_rng([] if device == CPU else [device], device_type=device.type)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    leaves, structure = flatten_tree((args, kwargs))
    return Arguments(leaves, structure, (len(args), *kwargs))


def _shallow(leaf: Any) -> Any:
    try:
        return copy.copy(leaf)  # a batch in which forward keeps its outputs
    except Exception:  # whatever a class raises of which there is no copy, such as a generator
        return leaf
