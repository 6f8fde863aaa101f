"""The companion of ``overlap=True``: its forward runs with the model's, its backward with the model's backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcl_optim import _torch
from dcl_optim._rng import CPU, RngState, on_device, replayed
from dcl_optim._tree import tensors_of
from dcl_optim.companion import Companion, inputs
from dcl_optim.distances import Distance
from dcl_optim.distributed import is_sharded
from dcl_optim.forecaster import ForwardRecord, Scale
from dcl_optim.overlap.executors import NO_RECOMPUTATION, Executor, executor_for


class OverlappedCompanion(Companion):
    """A companion that starts its work where it can first be done, with the numbers of the serial one.

    All threads of a process share the CPU's generator. So in a worker thread only networks run that draw nothing: the
    first forward is serial and shows whether they do, and where they draw, all others are serial too. So is a forward
    inside a mode that belongs to the caller's thread (a default device, a FLOP counter).

    Args:
        args, options: as for :class:`~dcl_optim.companion.Companion`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._executor: Executor | None = None
        self._place: torch.device | None = None  # the device that the executor is for
        self._draws: bool | None = None  # unknown until the first forward has ended
        self._recomputes: bool | None = None  # unknown until the first forward that is learned from has
        self._forecast_to_come: Callable[[], list[Tensor]] | None = None
        self._backward_to_come: list[Callable[[], None]] = []
        self._inputs: list[tuple[int, int]] = []
        self._place_of_batch: int | None = None  # the first input that is as long as the logits, known from a forward
        self._batch = 0  # the samples of the forecast to come, where it is cut

    # ---- the forward -------------------------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:
        self._abandon()
        self._run_backward()  # reads the weights that the script's changes are going to be written to
        super().before_forward(args, kwargs, rng_state, step)
        self._choose_executor()
        writes_may_show = self._sync.watches_values and bool(self._sync.shared)
        if not self._has_forecast or writes_may_show:  # both would write to what they share
            return
        if self._executor is None or (self._in_thread and not self._suits_a_thread()):
            return
        tensors, place = tensors_of((args, kwargs)), self._place_of_batch
        batch = 0  # which a fraction alone asks for
        if self._fraction != 1:
            if place is None or place >= len(tensors) or not tensors[place].ndim:
                return  # serially: the logits are going to say
            batch = len(tensors[place])
        self._inputs, self._batch = _fingerprint(args, kwargs), batch
        assert self._kept is not None
        work = functools.partial(self._forecast, self._kept.arguments, batch)
        if self._in_thread:
            self._forecast_to_come = list  # of an interrupt inside `start`, for the next forward to wait for
            self._forecast_to_come = self._executor.start(work)
        else:
            with replayed(on_device(rng_state, self._place)):
                self._forecast_to_come = self._executor.start(work)

    def _choose_executor(self) -> None:
        """Take the executor for the device where the companion is.

        Raises:
            RuntimeError: this companion cannot run concurrently with the model.
        """
        device = next(self.module.parameters()).device
        if device == self._place:
            return
        if _talks_to_other_ranks(self.module):
            raise RuntimeError(
                "overlap=True cannot run a companion whose forward talks to other ranks (SyncBatchNorm, sharded "
                "parameters), since two threads would do so in no fixed order; pass overlap=False"
            )
        self._executor, self._place = executor_for(device), device

    @property
    def _in_thread(self) -> bool:
        return self._executor is not None and self._executor.is_thread

    def _suits_a_thread(self) -> bool:
        return self._draws is False and not _torch.thread_has_modes()

    def predict(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], record: ForwardRecord, rng_state: RngState
    ) -> None:
        to_come, self._forecast_to_come = self._forecast_to_come, None
        if to_come is not None:
            forecast = to_come()
            self._note_draws(rng_state)
            self._require_same_inputs(args, kwargs)
            if self._batch not in (0, record.shape[0]):
                raise ValueError(
                    f"overlap=True: of a batch of {record.shape[0]} samples the companion has cut {self._batch}, since "
                    "the inputs come in another order than at first; pass overlap=False or companion_fraction=1"
                )
        else:
            self._note_draws(rng_state)
            arguments = self._as_given(args, kwargs)
            self._keep_what_is_written()
            with replayed(on_device(rng_state, self._device)), inputs.outside_checkpoints():
                forecast = self._forecast(arguments, record.shape[0])
                self._note_draws(rng_state)
            lengths = [len(tensor) if tensor.ndim else 0 for tensor in tensors_of((args, kwargs))]
            self._place_of_batch = lengths.index(record.shape[0]) if record.shape[0] in lengths else None
        self._require_no_recomputation(forecast[0])
        self._keep(forecast, (args, kwargs), record)

    def _note_draws(self, rng_state: RngState) -> None:
        """Give the thread up once the generator has moved; either network may be the one that draws."""
        if not self._in_thread:
            return
        self._draws = not torch.equal(rng_state[CPU], torch.get_rng_state())
        if self._draws:
            _torch.warn(
                "overlap=True: the model or its companion draws random numbers in its forward (dropout), which a "
                "worker thread cannot replay; the companion runs after the model from now on, as with overlap=False"
            )
            self.close()
            self._executor = None

    def _require_same_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _fingerprint(args, kwargs) != self._inputs:
            self.pause()
            raise RuntimeError(
                "overlap=True: the model's inputs were changed or replaced while it ran (by a forward pre-hook, or in "
                "place by the model), so the companion may have seen others; pass overlap=False"
            )

    def _require_no_recomputation(self, logits: Tensor) -> None:
        """Refuse reentrant checkpoints, by the first graph; the executor refuses the others itself."""
        if not self._in_thread:
            return
        if self._recomputes is None and logits.requires_grad:
            self._recomputes = _is_checkpointed(logits)
        if self._recomputes:
            self.pause()
            raise RuntimeError(NO_RECOMPUTATION)

    # ---- the backward ------------------------------------------------------------------------------------------------

    def observe(self, record: ForwardRecord, distance: Distance, alpha: float, scale: Scale) -> None:
        super().observe(record, distance, alpha, scale)
        if self._pending and self._executor is not None:
            pending, self._pending = self._pending, []
            work = functools.partial(self._run_backward_of, pending)
            self._backward_to_come.append(self._executor.start(work))

    def _run_backward(self) -> None:
        while self._backward_to_come:
            self._backward_to_come.pop(0)()
        super()._run_backward()

    # ---- the ends ----------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        super().backward()
        self.pause()  # the two steps come one after the other, each with all threads

    def step(self) -> None:
        super().step()
        self.pause()  # of evaluations inside the base's step

    def forget(self) -> None:
        self.pause()
        super().forget()
        self._backward_to_come = []

    def pause(self) -> None:
        if self._executor is not None:
            self._executor.settle()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _abandon(self) -> None:
        """Drop a forecast that was not asked for, since the model's forward raised."""
        if self._forecast_to_come is not None:
            self._forecast_to_come = None
            self.pause()
            torch.clear_autocast_cache()  # of what the companion has cast since the region ended that it began in

    def __getstate__(self) -> dict[str, Any]:
        self._run_backward()
        return super().__getstate__() | {"_forecast_to_come": None}


def _talks_to_other_ranks(module: nn.Module) -> bool:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    synchronised = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    return synchronised or any(map(is_sharded, module.parameters()))


def _is_checkpointed(logits: Tensor) -> bool:
    """Whether a reentrant checkpoint is in the graph of these logits."""
    seen, waiting = set(), [logits.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen:
            if node.name() == "CheckpointFunctionBackward":
                return True
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False


def _fingerprint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, int]]:
    """Which tensors the inputs are, and how often they have been written to."""
    return [(id(tensor), _torch.version_of(tensor)) for tensor in tensors_of((args, kwargs))]
