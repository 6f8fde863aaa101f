"""A worker thread and exceptions out of signal handlers, at every place where Python may raise one."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from dcl_optim.overlap import executors
from tests.helpers import PATIENCE, cells, intra_op_threads, worker_threads


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
