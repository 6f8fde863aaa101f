"""Executors by themselves: order, errors, settings, what is held and given back, exceptions out of signal handlers."""

from __future__ import annotations

import contextvars
import copy
import gc
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch

from dcl_optim.overlap import executors
from tests.helpers import PATIENCE, backward, batches, cells, intra_op_threads, mlp, one, train, worker_threads, wrap


@pytest.fixture
def worker():
    executor = executors.WorkerThread()
    yield executor
    executor.close()


def test_a_device_has_its_executor(monkeypatch):
    monkeypatch.setattr(executors, "_cores", lambda: 2)
    assert type(executors.executor_for(torch.device("cpu"))) is executors.WorkerThread
    assert type(executors.executor_for(torch.device("cuda", 1))) is executors.CudaStream
    monkeypatch.setattr(executors, "_cores", lambda: 1)
    assert executors.executor_for(torch.device("cpu")) is None
    for kind in ("meta", "mps", "xpu"):
        with pytest.raises(RuntimeError, match=f"overlap=True runs on cpu and cuda, not on {kind}; pass overlap=False"):
            executors.executor_for(torch.device(kind))


def test_work_runs_concurrently_with_the_caller_in_the_order_in_which_it_was_started(worker):
    meeting, order = threading.Barrier(2, timeout=PATIENCE), []
    results = [worker.start(lambda i=i: (meeting.wait(), order.append(i), i)[-1]) for i in range(3)]
    for _ in range(3):
        meeting.wait()  # would break if the work were waited for above
    assert [result() for result in reversed(results)] == [2, 1, 0]
    assert order == [0, 1, 2]


def test_an_error_comes_out_where_the_result_is_asked_for_and_the_next_work_is_done(worker):
    failing, following = worker.start(lambda: 1 / 0), worker.start(lambda: "done")
    assert following() == "done"
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        failing()


def test_an_error_gives_the_threads_back_at_once(worker):
    with intra_op_threads(4):
        failing = worker.start(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing()
        assert torch.get_num_threads() == 4


def test_settling_waits_and_raises_nothing(worker):
    go, done = threading.Event(), []
    worker.start(lambda: (go.wait(PATIENCE), done.append(1), 1 / 0))
    threading.Timer(0.05, go.set).start()
    worker.settle()
    assert done == [1]


def test_closing_ends_the_thread_and_a_later_start_begins_another(worker):
    existing = set(worker_threads())
    for _ in range(2):
        assert worker.start(threading.current_thread)() in set(worker_threads()) - existing
        worker.close()
        assert set(worker_threads()) - existing == set()
    worker.close()


def test_what_the_work_has_made_is_freed(worker):
    class Value:
        pass

    made = []
    for taken in ("result", "settle"):
        result = worker.start(lambda: (value := Value(), made.append(weakref.ref(value)))[0])
        result() if taken == "result" else worker.settle()
        del result
        worker.start(lambda: None)()  # by when the thread has dropped the piece of work before
        gc.collect()
        assert made[-1]() is None, taken


def test_the_worker_has_the_callers_autocast_and_leaves_its_cache_alone(worker, monkeypatch):
    cleared = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(threading.current_thread()), clear()))

    def settings():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    outside = settings()
    for dtype, enabled, cached in itertools.product((torch.bfloat16, torch.float16), (True, False), (True, False)):
        with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=cached):
            assert settings() == (enabled, dtype, cached)
            assert worker.start(settings)() == (enabled, dtype, cached)
        assert worker.start(settings)() == outside
    assert set(cleared) == {threading.main_thread()}


def test_the_worker_sees_the_callers_context(worker):
    variable = contextvars.ContextVar("variable", default="nobody's")
    for value in ("one", "another"):
        variable.set(value)
        assert worker.start(variable.get)() == value


def test_caller_and_worker_have_half_of_the_threads_each_until_the_work_is_settled(worker):
    for given in (1, 2, 5):
        with intra_op_threads(given):
            result = worker.start(torch.get_num_threads)
            assert torch.get_num_threads() == result() == max(1, given // 2)
            assert worker.start(torch.get_num_threads)() == max(1, given // 2), "not a half of the half"
            worker.settle()
            assert torch.get_num_threads() == given
            worker.settle()
            assert torch.get_num_threads() == given


def test_two_workers_take_one_half_and_give_it_back(worker):
    other = executors.WorkerThread()
    for first, last in ((worker, other), (other, worker)):
        with intra_op_threads(8):
            for each in (worker, other):
                each.start(lambda: None)()
            assert torch.get_num_threads() == 4
            first.settle()
            assert torch.get_num_threads() == 4
            last.settle()
            assert torch.get_num_threads() == 8
    other.close()


def test_a_copy_begins_anew(worker):
    worker.start(lambda: None)
    again = copy.deepcopy(worker)
    try:
        assert again.start(threading.current_thread)() is not worker.start(threading.current_thread)()
    finally:
        again.close()


def test_a_worker_that_goes_in_another_thread_does_not_keep_the_callers_threads():
    gone = executors.WorkerThread()
    with intra_op_threads(4):
        gone.start(lambda: None)()
        last = [gone]
        del gone
        thread = threading.Thread(target=last.clear)
        thread.start()
        thread.join()
        other = executors.WorkerThread()
        other.start(lambda: None)()
        assert torch.get_num_threads() == 2
        other.close()
        assert torch.get_num_threads() == 4


def test_the_streams_wait_for_each_other(monkeypatch):
    both = mock.Mock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: both.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: both.caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    result = executors.CudaStream(torch.device("cuda")).start(both.work)
    begun = [mock.call.side.wait_stream(both.caller), mock.call.work()]
    assert both.mock_calls == begun
    assert result() is both.work()
    assert both.mock_calls == [*begun, mock.call.caller.wait_stream(both.side), mock.call.work()]


def test_a_stream_holds_what_its_work_reads_until_the_caller_has_waited(monkeypatch):
    """A gradient is memory of the caller's stream, which would hand it out again while the other still reads it."""
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    stream = executors.CudaStream(torch.device("cuda"))
    model = mlp()
    optimizer = wrap(model, overlap=True)
    train(model, optimizer, batches(1))
    monkeypatch.setattr(optimizer.forecaster, "_executor", stream)
    gradients = []
    optimizer.companion[-1].register_full_backward_pre_hook(
        lambda module, gradient: gradients.append(weakref.ref(gradient[0].untyped_storage()))
    )
    for micro_batch in range(2):
        backward(model, *one())
        assert [gradient() is not None for gradient in gradients] == [False] * micro_batch + [True]
    optimizer.step()
    assert [gradient() for gradient in gradients] == [None, None]


# ---- exceptions out of signal handlers, at every place where Python may raise one ------------------------------------


class Interrupt(BaseException):
    """What a signal handler raises; KeyboardInterrupt is one."""


class Strike:
    """Raises at the n-th place where CPython may run a signal handler, or before the n-th instruction of executors.py.

    CPython runs handlers when a function begins and when a call returns, in whatever module.
    """

    def __init__(self, kind: str, number: int) -> None:
        self.install, self.left = (sys.setprofile if kind == "call" else sys.settrace), number

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if self.install is sys.settrace:
            if frame.f_code.co_filename != executors.__file__:
                return None
            frame.f_trace_opcodes = True
        if event in (("opcode",) if self.install is sys.settrace else ("call", "c_return")):
            self.left -= 1
            if self.left == 0:
                raise Interrupt
        return self

    def __enter__(self) -> None:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has to know before the trace function is installed
        self.install(self)

    def __exit__(self, *exception: object) -> None:
        self.install(None)


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread that may hang; its result, or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=PATIENCE)
    assert found, f"deadlock: {function}"
    value, error = found[0]
    if error is not None:
        raise error
    return value


class Scenario:
    """Work that is started and waited for, and what must hold after an interrupt anywhere in it."""

    def __init__(self, name: str) -> None:
        self.worker, self.done = executors.WorkerThread(), list[int]()
        self.scenario, self.go = getattr(self, name), threading.Event()
        if name != "start":  # which alone does not wait
            self.go.set()

    def work(self) -> None:
        self.go.wait(PATIENCE)
        time.sleep(1e-3)  # so that who does not wait is seen
        self.done.append(1)

    def start(self) -> None:
        self.worker.start(self.work)

    def result(self) -> None:
        self.worker.start(self.work)()

    def settle(self) -> None:
        self.worker.start(self.work)
        self.worker.settle()

    def close(self) -> None:
        self.worker.start(self.work)
        self.worker.close()

    def again(self) -> None:
        """As the second forward of a script: the thread is there."""
        for _ in range(2):
            self.worker.start(self.work)()
        self.worker.settle()

    def require_order(self) -> None:
        self.go.set()
        self.worker.settle()
        assert torch.get_num_threads() == 4
        ended = len(self.done)
        assert self.worker.start(lambda: "next")() == "next"
        assert len(self.done) == ended, "work that settle has not waited for"
        assert torch.get_num_threads() == 2
        self.worker.close()
        assert torch.get_num_threads() == 4


def interrupted(name: str, kind: str, number: int) -> bool:
    """Interrupt a scenario; False where it has fewer places than that."""
    scenario, strike = Scenario(name), Strike(kind, number)
    torch.set_num_threads(4)
    with suppress(Interrupt), strike:
        scenario.scenario()
    scenario.require_order()
    return strike.left <= 0


@pytest.mark.parametrize(
    ("kind", "every"), cells([("call", 1), ("instruction", 1), ("instruction", 11)], ("call", 1), ("instruction", 11))
)
@pytest.mark.parametrize("name", ["start", "result", "settle", "close", "again"])
def test_an_interrupt_anywhere_neither_deadlocks_nor_loses_work(
    name: str, kind: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A weak reference's callback may be struck; pytest's hook is in Python, and would be struck in its turn.
    monkeypatch.setattr(sys, "unraisablehook", deque[Any](maxlen=0).append)
    before = set(worker_threads())
    with intra_op_threads(4):
        number = next(n for n in itertools.count(1, every) if not in_a_thread(lambda n=n: interrupted(name, kind, n)))
    assert number > 10
    for thread in set(worker_threads()) - before:
        thread.join(timeout=PATIENCE)
    assert set(worker_threads()) <= before


def use_an_executor() -> None:
    """For tests/reliability/interrupts.py: nothing but an executor, which starts a thread each time."""
    worker = executors.WorkerThread()
    results = [worker.start(lambda i=i: i) for i in range(3)]
    assert [result() for result in results] == [0, 1, 2]
    worker.settle()
    worker.close()
