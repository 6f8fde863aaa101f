"""Ctrl-C in the middle of a step: both networks before it, or both after it."""

from __future__ import annotations

import copy
import signal
import threading

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.interrupts import postponed
from tests.helpers import CLASSES, assert_same, batches, mlp


def wrap(variant, model):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return (
        DCLOptimizer(base, model, weight=1.0)
        if variant == "dcl"
        else DCPOptimizer(base, model, CLASSES, weight=1.0, alpha=0.6)
    )


def press(*_):
    signal.raise_signal(signal.SIGINT)


def one_step(variant, model, optimizer, x, y, with_closure):
    def closure():
        optimizer.zero_grad()
        if variant == "dcp":
            optimizer.set_targets(y)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if with_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_an_interrupt_during_the_bases_step_comes_after_both_networks_have_stepped(variant, with_closure):
    model, calm = mlp(), mlp()
    optimizer, expected = wrap(variant, model), wrap(variant, calm)
    optimizer.base.register_step_post_hook(press)
    for x, y in batches(3):
        with pytest.raises(KeyboardInterrupt):
            one_step(variant, model, optimizer, x, y, with_closure)
        one_step(variant, calm, expected, x, y, with_closure)
        assert_same(optimizer.state_dict(), expected.state_dict())
        assert_same(model, calm)


def test_an_interrupt_in_backward_leaves_both_before_the_step():
    model = mlp()
    optimizer = wrap("dcl", model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    (x, y), *rest = batches(4)
    logits = model(x)
    logits.register_hook(press)
    with pytest.raises(KeyboardInterrupt):
        F.cross_entropy(logits, y).backward()
    assert_same((model.state_dict(), optimizer.state_dict()), before)

    calm = mlp()
    expected = wrap("dcl", calm)
    for x, y in rest:
        one_step("dcl", model, optimizer, x, y, False)
        one_step("dcl", calm, expected, x, y, False)
    assert_same(model, calm)
    assert_same(optimizer.companion, expected.companion)


def test_a_second_interrupt_is_not_held_back():
    reached = []

    def pressed_twice():
        with postponed():
            press()
            reached.append("first")
            press()
            reached.append("second")

    with pytest.raises(KeyboardInterrupt):
        pressed_twice()
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_the_script_are_called_afterwards_and_stay():
    calls = []
    previous = signal.signal(signal.SIGINT, lambda *_: calls.append("script"))
    try:
        with postponed():
            press()
            assert calls == []
        assert calls == ["script"]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with postponed():
            press()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_steps_in_other_threads_leave_signals_alone():
    model = mlp()
    optimizer = wrap("dcl", model)
    x, y = next(batches(1))
    failures = []

    def run():
        try:
            one_step("dcl", model, optimizer, x, y, False)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []
    assert optimizer.logs()["step"] == 1
