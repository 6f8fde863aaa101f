"""Executors by themselves: order, errors, the caller's settings in the worker, what is held and what is given back."""

from __future__ import annotations

import contextvars
import copy
import gc
import itertools
import threading
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from dcl_optim.overlap import executors
from tests.helpers import backward, batches, intra_op_threads, mlp, one, train, worker_threads, wrap


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
    meeting, order = threading.Barrier(2, timeout=20), []
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
    worker.start(lambda: (go.wait(20), done.append(1), 1 / 0))
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
