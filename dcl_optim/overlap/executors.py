"""Where work runs concurrently with the caller: in a worker thread, or on a CUDA stream.

An executor *starts* a piece of work and gives a function that waits for its result. It does the pieces in the order in
which they were started.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from dcl_optim._torch import start_new_thread

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
        self._workers.add(worker)  # first: the garbage collector may take another one, which gives its threads back
        now = torch.get_num_threads()
        if self._own is None or now != _half(self._own):  # the latter where the script has set another one since
            self._own = now
            torch.set_num_threads(_half(now))
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


class _Outcome(Generic[T]):
    """What a piece of work returned or raised, once it has ended.

    An exception out of a signal handler (Ctrl-C) may strike in the main thread between any two instructions. It would
    leave a lock of ``threading.Event`` or ``Future`` locked for good; ``SimpleQueue`` is written in C and has none.
    """

    def __init__(self) -> None:
        self.ended = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._signal: SimpleQueue[None] = SimpleQueue()

    def end(self, value: T | None = None, error: BaseException | None = None) -> None:
        self._value, self._error, self.ended = value, error, True
        self._signal.put(None)

    def wait(self) -> None:
        if not self.ended:
            self._signal.put(self._signal.get())  # back, for a wait that this one has interrupted

    def take(self) -> T:
        """Return or raise it, once: what it holds is the caller's then."""
        value, error, self._value, self._error = self._value, self._error, None, None
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class _Thread(threading.Thread):
    """A thread that does pieces of work in the order in which they are put.

    A daemon, for which the interpreter's exit does not wait before :func:`_end_at_exit`.
    """

    def __init__(self) -> None:
        super().__init__(name="dcl_optim_0", daemon=True)
        self.process = os.getpid()  # a forked one has the object without the thread
        self.pieces: SimpleQueue[tuple[Callable[[], Any], _Outcome[Any]] | None] = SimpleQueue()
        self.begun: _Outcome[None] = _Outcome()
        self.ending = False

    def launch(self) -> None:
        """Start, in a thread that no signal handler runs in: ``start`` has locks."""
        try:
            self.start()
        except RuntimeError as error:  # there are too many threads
            self.begun.end(error=error)

    def run(self) -> None:
        self.begun.end()
        while (piece := self.pieces.get()) is not None:
            work, outcome = piece
            outcome.end(*_value_and_error(work))
            del piece, work, outcome

    def takes_work(self) -> bool:
        return not self.ending and self.process == os.getpid()

    def end(self) -> None:
        """Let it end after what it has to do; any number of times."""
        self.ending = True
        self.pieces.put(None)


def _value_and_error(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


@atexit.register
def _end_at_exit() -> None:
    """Wait for all work: a thread that the interpreter's end finds inside torch would abort the process."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread) and thread.is_alive()]
    for thread in threads:
        thread.end()
        thread.join()


class WorkerThread(Executor):
    """A worker thread, which has one half of the caller's intra-op threads while the caller has the other.

    The halves last until :meth:`settle`, not from one piece of work to the next: threads that OpenMP has woken in
    between look for work for milliseconds, on the core where the next piece is to run.

    Every line leaves what the next :meth:`settle` can wait for, if an exception out of a signal handler cuts in after
    it. A forked process begins with a thread of its own.
    """

    is_thread = True
    _thread: _Thread | None = None

    def __init__(self) -> None:
        self._started: set[_Outcome[Any]] = set()  # and not taken

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        thread = self._running_thread()
        threads = _shared_threads.take(self)
        run = contextvars.copy_context().run
        outcome: _Outcome[T] = _Outcome()
        self._started.add(outcome)  # first: work that was put is waited for
        thread.pieces.put((functools.partial(run, _run, work, threads, _autocast_settings()), outcome))

        def result() -> T:
            try:
                if not outcome.ended and not thread.takes_work():
                    raise RuntimeError(
                        "overlap=True: this process was forked in the middle of a training step, whose companion runs "
                        "in the parent; fork between two steps, or clear the gradients and begin with a forward"
                    )
                outcome.wait()
                self._started.discard(outcome)
                return outcome.take()  # nobody else holds what the work has made
            except Exception:
                self.settle()  # what would have settled may not come
                raise

        return result

    def _running_thread(self) -> _Thread:
        if self._thread is None or not self._thread.takes_work():
            self._end()
            thread = _Thread()
            try:
                start_new_thread(thread.launch, ())
                thread.begun.wait()
                thread.begun.take()
                self._thread = thread
            except BaseException:
                thread.end()
                raise
        return self._thread

    def settle(self) -> None:
        if self._started:
            if self._thread is not None and self._thread.takes_work():
                # Not for each piece: one that an exception kept from being put would never end.
                last: _Outcome[None] = _Outcome()
                self._thread.pieces.put((_nothing, last))
                last.wait()
            self._started.clear()
        _shared_threads.give_back(self)

    def close(self) -> None:
        self.settle()
        self._end()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def __del__(self) -> None:
        self._end()
        _shared_threads.give_back(self)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__ | {"_thread": None}


def _nothing() -> None:
    pass


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
