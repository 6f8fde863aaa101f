"""Where work runs concurrently with the caller: in a worker thread, or on a CUDA stream.

An executor *starts* a piece of work and gives a function that waits for its result. It does the pieces in the order in
which they were started.
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

NO_RECOMPUTATION = (
    "overlap=True cannot run a companion that recomputes or offloads what it saves for backward (activation "
    "checkpointing), since both threads would set the RNG state that they share; pass overlap=False"
)


class Executor(ABC):
    """One way to run work concurrently.

    Attributes:
        is_thread: whether the work runs in another thread, which shares the process's CPU generator.
    """

    is_thread = False

    @abstractmethod
    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start a piece of work; give a function that waits for it and returns or raises what it did."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all that was started, however it ends, and give the caller its threads back."""

    def close(self) -> None:
        """Settle, and keep nothing that runs; a later start begins anew."""
        self.settle()


class _SharedThreads(threading.local):
    """How many intra-op threads the calling thread has: half of the script's number while any worker runs."""

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[WorkerThread] = weakref.WeakSet()
        self._own: int | None = None  # the script's number, while it is halved

    def take(self, worker: WorkerThread) -> int:
        """Share the threads with a worker; return how many it gets."""
        now = torch.get_num_threads()
        if self._own is None or now != _half(self._own):  # the latter where the script has set another one since
            self._own = now
            torch.set_num_threads(_half(now))
        self._workers.add(worker)
        return _half(self._own)

    def give_back(self, worker: WorkerThread) -> None:
        """Take a worker's threads back; the script's number is restored unless it has set another one since."""
        self._workers.discard(worker)
        if self._own is not None and not self._workers:
            if torch.get_num_threads() == _half(self._own):
                torch.set_num_threads(self._own)
            self._own = None


def _half(threads: int) -> int:
    return max(1, threads // 2)


_shared_threads = _SharedThreads()


class WorkerThread(Executor):
    """A worker thread, which has one half of the caller's intra-op threads while the caller has the other.

    The halves last until :meth:`settle`, not from one piece of work to the next: threads that OpenMP has woken in
    between look for work for milliseconds, on the core where the next piece is to run.
    """

    is_thread = True

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._started: set[Future[Any]] = set()

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="dcl_optim")
        threads = _shared_threads.take(self)
        run = contextvars.copy_context().run
        future = self._pool.submit(run, _run, work, threads, _autocast_settings())
        self._started.add(future)

        def result() -> T:
            try:
                return future.result()
            except Exception:
                self.settle()  # what would have settled may not come
                raise
            finally:
                self._started.discard(future)  # it holds what the work has made

        return result

    def settle(self) -> None:
        wait(self._started)
        self._started.clear()
        _shared_threads.give_back(self)

    def close(self) -> None:
        self.settle()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __del__(self) -> None:
        _shared_threads.give_back(self)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__ | {"_pool": None}


class CudaStream(Executor):
    """A CUDA stream of the companion's: launched at once, waited for by the device and not by the caller."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._held: list[Any] = []

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        # Memory needs no record_stream: the side stream waits for the caller's before each piece of work, the caller's
        # for the side stream before a result is used, and what was given to the work is held until then.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._held.append(work)
        with torch.cuda.stream(self._stream):
            value = work()

        def result() -> T:
            self.settle()
            return value

        return result

    def settle(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._held.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stream": None, "_held": []}


def executor_for(device: torch.device) -> Executor | None:
    """The executor for work on a device; None where a single core has room for the caller alone.

    Raises:
        RuntimeError: there is none for this kind of device.
    """
    if device.type == "cuda":
        return CudaStream(device)
    if device.type == "cpu":
        return WorkerThread() if _cores() > 1 else None
    raise RuntimeError(f"overlap=True runs on cpu and cuda, not on {device.type}; pass overlap=False")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


AutocastSettings = tuple[str, bool, torch.dtype, bool]


def _autocast_settings() -> AutocastSettings:
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return "cpu", enabled, dtype, torch.is_autocast_cache_enabled()


def _run(work: Callable[[], T], threads: int, autocast: AutocastSettings) -> T:
    """Do a piece of work in the worker thread, with the caller's settings."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    device, enabled, dtype, caches = autocast
    # Not torch.autocast, which empties the cache of all threads when a thread leaves it.
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(caches)
    with torch.autograd.graph.disable_saved_tensors_hooks(NO_RECOMPUTATION):
        return work()
