"""Lanes by themselves: order, errors, the caller's settings inside the worker, what is held and what is given back."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref

import pytest
import torch

from dcl_optim import lanes
from tests.helpers import intra_op_threads, worker_threads


@pytest.fixture
def worker():
    lane = lanes.Worker()
    yield lane
    lane.close()


def test_a_device_has_its_lane(monkeypatch):
    monkeypatch.setattr(lanes, "_cores", lambda: 2)
    assert type(lanes.beside(torch.device("cpu"))) is lanes.Worker
    assert type(lanes.beside(torch.device("cuda", 1))) is lanes.SideStream
    monkeypatch.setattr(lanes, "_cores", lambda: 1)
    assert type(lanes.beside(torch.device("cpu"))) is lanes.Serial
    for kind in ("meta", "mps", "xpu"):
        with pytest.raises(RuntimeError, match=f"overlap=True runs on cpu and cuda, not on {kind}; pass overlap=False"):
            lanes.beside(torch.device(kind))


def test_serial_work_is_done_when_it_is_asked_for():
    done = []
    result = lanes.Serial().start(lambda: done.append(threading.current_thread()))
    assert done == []
    result()
    assert done == [threading.main_thread()]


def test_work_goes_on_beside_the_caller_in_the_order_in_which_it_was_started(worker):
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
    worker.settle()


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


@pytest.mark.parametrize("taken", ["result", "settle"])
def test_what_the_work_has_made_is_let_go(taken, worker):
    class Value:
        pass

    made = []
    result = worker.start(lambda: (value := Value(), made.append(weakref.ref(value)))[0])
    result() if taken == "result" else worker.settle()
    del result
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_the_worker_has_the_callers_autocast_and_leaves_its_cache_alone(enabled, cached, worker, monkeypatch):
    cleared = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(threading.current_thread()), clear()))

    def settings():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    outside = settings()
    for dtype in (torch.bfloat16, torch.float16):
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


@pytest.mark.parametrize("given", [1, 2, 5])
def test_caller_and_worker_have_half_of_the_threads_each_until_the_caller_rests(given, worker):
    with intra_op_threads(given):
        result = worker.start(torch.get_num_threads)
        assert torch.get_num_threads() == result() == max(1, given // 2)
        assert worker.start(torch.get_num_threads)() == max(1, given // 2), "not a half of the half"
        worker.rest()
        assert torch.get_num_threads() == given
        worker.rest()
        assert torch.get_num_threads() == given


@pytest.mark.parametrize("first_to_rest", [0, 1])
def test_two_lanes_take_one_half_and_give_it_back(first_to_rest, worker):
    other = lanes.Worker()
    with intra_op_threads(8):
        for lane in (worker, other):
            lane.start(lambda: None)()
        pair = (worker, other) if first_to_rest == 0 else (other, worker)
        for lane in pair:
            lane.rest()
        assert torch.get_num_threads() == 8
    other.close()


def test_a_worker_that_goes_in_another_thread_does_not_keep_the_callers_threads():
    gone = lanes.Worker()
    with intra_op_threads(4):
        gone.start(lambda: None)()
        last = [gone]
        del gone
        thread = threading.Thread(target=last.clear)
        thread.start()
        thread.join()
        other = lanes.Worker()
        other.start(lambda: None)()
        assert torch.get_num_threads() == 2
        other.close()
        assert torch.get_num_threads() == 4
