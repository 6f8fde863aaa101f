"""Running the companion beside the model: what is begun with the model's forward is the very forward that was due."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dcl_optim import compilation, distributed, lanes
from dcl_optim.inputs import tensors_of
from dcl_optim.random_state import RandomState, on_device, replayed
from dcl_optim.wrapper import is_torchs_own

T = TypeVar("T")
Forward = Callable[[tuple[Any, ...], dict[str, Any]], T]


class Overlap:
    """Begins the companion's forward with the model's, and hands its result over when the model's has ended.

    The first forward is done in its turn: it shows whether the model draws random numbers. So is, where there would be
    another thread, a forward inside modes that stay with the caller's (a default device other than the CPU, a FLOP
    counter), and all forwards of a compiled companion that draws.

    Args:
        module: the companion.
        wanted: whether to overlap at all.

    Attributes:
        lane: where the companion's work is done by now.
    """

    def __init__(self, module: nn.Module, wanted: bool) -> None:
        self._module, self._wanted = module, wanted
        self.lane: lanes.Lane = lanes.Serial()
        self._device: torch.device | None = None
        self._draws: bool | None = None  # unknown until the first forward has ended
        self._inspected = self._compiled = False
        self._result: Callable[[], Any] | None = None
        self._inputs: list[tuple[int, int]] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: RandomState, forward: Forward[Any]) -> None:
        """Begin a forward of the companion, if it can run beside the model's.

        Raises:
            RuntimeError: this companion cannot run beside the model.
        """
        if not self._wanted:
            return
        self._choose_lane()
        if not self.lane.is_beside or (self.lane.shares_generators and not self._suits_a_thread()):
            return
        self._inputs = _fingerprint(args, kwargs)
        work = functools.partial(forward, args, kwargs)
        if self.lane.shares_generators:
            self._result = self.lane.start(work, _generator(state) if self._draws else None)
        else:
            with replayed(on_device(state, self._device)):
                self._result = self.lane.start(work)

    def result(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: RandomState) -> Any:
        """What the forward that was begun has given; None if none was.

        Raises:
            RuntimeError: the model was called with other inputs than the companion, or has changed them.
        """
        self._note_draws(state)
        begun, self._result = self._result, None
        if begun is None:
            return None
        try:
            forecast = begun()
            self._require_same(_fingerprint(args, kwargs))
        except BaseException:
            self.lane.rest()
            raise
        return forecast

    def _require_same(self, inputs: list[tuple[int, int]]) -> None:
        if inputs != self._inputs:
            raise RuntimeError(
                "overlap=True: the model's inputs were changed or replaced while it ran (by a forward pre-hook, or in "
                "place by the model), so the companion may have seen others; pass overlap=False"
            )

    def start_step(self, move: Callable[[], None], *optimizers: Optimizer) -> Callable[[], None]:
        """Start the companion's step beside the model's: its own, and the model's, which goes on meanwhile.

        An optimizer of another library may evaluate the model again or draw random numbers; then it is done afterwards.
        """
        return self.lane.start(move) if all(map(is_torchs_own, optimizers)) else move

    def _suits_a_thread(self) -> bool:
        """Whether another thread would do the same: modes stay with theirs, compiled networks draw by themselves."""
        modes = [mode for mode in _get_current_function_mode_stack() if not _is_for_the_cpu(mode)]
        return (
            self._inspected
            and not (self._draws and self._compiled)
            and not modes
            and not _get_current_dispatch_mode_stack()
        )

    def _choose_lane(self) -> None:
        device = next(self._module.parameters()).device
        if device != self._device:
            self._require_independence()
            self.lane.close()
            self.lane, self._device = lanes.beside(device), device

    def _require_independence(self) -> None:
        parameters = list(self._module.parameters())
        if distributed.world_size() > 1:
            synchronised = any(isinstance(module, nn.SyncBatchNorm) for module in self._module.modules())
            if synchronised or any(map(distributed.is_sharded, parameters)):
                raise RuntimeError(
                    "overlap=True cannot run a companion whose forward talks to other processes (SyncBatchNorm, "
                    "sharded parameters), since two threads would do so in no fixed order; pass overlap=False"
                )

    def inspect(self, state: RandomState) -> None:
        """Look at a forward of the companion that was done in its turn, before the random streams go on."""
        self._note_draws(state)
        if self.lane.shares_generators and not self._inspected:
            self._inspected = True
            self._compiled = any(map(compilation.is_compiled, self._module.modules()))

    def backward(self, logits: Tensor, gradient: Tensor, parameters: Iterable[Tensor]) -> None:
        """Go back through the companion's logits, on the lane that this is called on.

        Raises:
            RuntimeError: parts of the forward would be run again, which sets the random state that two threads share. A
                reentrant checkpoint says so itself where it is told the leaves; what does the same by hooks on saved
                tensors, a lane refuses.
        """
        if not self.lane.shares_generators:
            logits.backward(gradient)
            return
        try:
            logits.backward(gradient, inputs=[parameter for parameter in parameters if parameter.requires_grad])
        except RuntimeError as error:
            if "checkpoint" in str(error):
                raise RuntimeError(lanes.NO_RECOMPUTATION) from error
            raise

    def _note_draws(self, state: RandomState) -> None:
        """Either network may be the one that draws."""
        if self.lane.shares_generators and not self._draws:
            self._draws = not torch.equal(state[torch.device("cpu")], torch.get_rng_state())

    def abandon(self) -> None:
        """The model's forward has ended: by an error, if what was begun is still waited for."""
        if self._result is not None:
            self._result = None
            self.lane.settle()
            torch.clear_autocast_cache()  # of what the companion has cast since the region ended that it began in

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_result": None}


def _is_for_the_cpu(mode: Any) -> bool:
    """Whether a mode only says that new tensors are to be on the CPU, as they are without it."""
    return isinstance(mode, DeviceContext) and mode.device.type == "cpu"


def _generator(state: RandomState) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state[torch.device("cpu")])
    return generator


def _fingerprint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, int]]:
    """Which tensors the inputs are, and how often they have been written to."""
    return [(id(t), 0 if t.is_inference() else t._version) for t in tensors_of((args, kwargs))]
