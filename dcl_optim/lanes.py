"""Where the companion's work is done: in its turn, beside the model in a worker thread, or beside it on a CUDA stream.

A lane *starts* a piece of work and gives a function that waits for it. Work of one lane is done in the order in which
it was started.
"""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lane(ABC):
    """One way to do the companion's work.

    Attributes:
        is_beside: whether work that was started goes on while the caller does something else.
        shares_generators: whether it draws from the generators that the caller draws from at the same time.
    """

    is_beside = False
    shares_generators = False

    @abstractmethod
    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start a piece of work.

        Args:
            work: a function without arguments.

        Returns:
            A function that waits for the work and returns what it returned, or raises what it raised.
        """

    def rest(self) -> None:  # noqa: B027
        """The step is over, or the script does something else: the caller has again what it gave up for the work.

        Not between two pieces of work of a step: threads that OpenMP has woken there look for work for milliseconds, on
        the core where the next piece is to run.
        """

    def settle(self) -> None:  # noqa: B027
        """Wait for all that was started, however it ends."""

    def close(self) -> None:  # noqa: B027
        """Settle, and keep nothing that runs."""


class Serial(Lane):
    """In the caller's thread, when the result is asked for."""

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        return work


class _CoresShared(threading.local):
    """How many intra-op threads the calling thread has: half of its own number while any worker works beside it."""

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._own: int | None = None  # the script's number, while it is halved

    def by(self, worker: Worker) -> int:
        """Share the threads with a worker; say how many it gets."""
        now = torch.get_num_threads()
        if self._own is None or now != _half(self._own):  # the latter where the script has set another one since
            self._own = now
            torch.set_num_threads(_half(now))
        self._workers.add(worker)
        return _half(self._own)

    def no_more_by(self, worker: Worker) -> None:
        """Take a worker's part back; the script's number is restored unless it has set another one since."""
        self._workers.discard(worker)
        if self._own is not None and not self._workers:
            if torch.get_num_threads() == _half(self._own):
                torch.set_num_threads(self._own)
            self._own = None


def _half(threads: int) -> int:
    return max(1, threads // 2)


_cores_shared = _CoresShared()


class Worker(Lane):
    """In a worker thread, which has one half of the caller's intra-op threads while the caller has the other."""

    is_beside = shares_generators = True

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._started: set[Future[Any]] = set()

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="dcl_optim")
        threads = _cores_shared.by(self)
        run = contextvars.copy_context().run
        future = self._executor.submit(run, _run, work, threads, _autocast_settings())
        self._started.add(future)

        def result() -> T:
            try:
                return future.result()
            finally:
                self._started.discard(future)  # it holds what the work has made

        return result

    def rest(self) -> None:
        _cores_shared.no_more_by(self)

    def settle(self) -> None:
        wait(self._started)
        self._started.clear()
        self.rest()

    def close(self) -> None:
        self.settle()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __del__(self) -> None:
        self.rest()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__ | {"_executor": None}


class SideStream(Lane):
    """On a CUDA stream beside the caller's: launched at once, waited for by the device and not by the caller."""

    is_beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        # Memory needs no record_stream: the side stream waits for the caller's before each piece of work, the caller's
        # for the side stream before a result is used, and what the work holds is held until then.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            value = work()

        def result(held: Any = work) -> T:
            self.settle()
            return value

        return result

    def settle(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stream": None}


def beside(device: torch.device) -> Lane:
    """The lane that runs beside a caller for work on a device; a single core has room for the caller alone.

    Raises:
        RuntimeError: there is none for this kind of device.
    """
    if device.type == "cuda":
        return SideStream(device)
    if device.type == "cpu":
        return Worker() if _cores() > 1 else Serial()
    raise RuntimeError(f"overlap=True runs on cpu and cuda, not on {device.type}; pass overlap=False")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


AutocastSettings = tuple[str, bool, torch.dtype, bool]


def _autocast_settings() -> AutocastSettings:
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return "cpu", enabled, dtype, torch.is_autocast_cache_enabled()


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype, caches: bool) -> None:
    # Not torch.autocast, which empties the cache of all threads when a thread leaves it.
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(caches)


def _run(work: Callable[[], T], threads: int, autocast: AutocastSettings) -> T:
    """Do a piece of work in the worker thread, with the caller's settings."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    _set_autocast(*autocast)
    with torch.autograd.graph.disable_saved_tensors_hooks(NO_RECOMPUTATION):
        return work()


NO_RECOMPUTATION = (
    "overlap=True cannot run a companion that recomputes or offloads what it saves for backward (activation "
    "checkpointing), since both threads would set the random state that they share; pass overlap=False"
)
