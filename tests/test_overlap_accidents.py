"""overlap=True when something raises: the caller sees it, and a retry ends where the serial run does.

Weaker than the serial way, by what is already done when the model fails: the companion's batch-norm statistics have
seen the batch, and an error inside the base's own step comes when the companion may have stepped.
"""

from __future__ import annotations

import copy
import signal
import threading
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from tests import test_accidents as serial
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    batches,
    mlp,
    one,
    snapshot,
    surviving_tensors,
    train,
    wrap,
)

LOOPS = pytest.mark.parametrize("loop", ["plain", "closure"])
# An error inside of the base's step: see test_an_error_in_the_bases_step
ACCIDENTS = pytest.mark.parametrize("accident", [name for name in serial.ACCIDENTS if "the base's step" not in name])


class Script(serial.Script):
    """The training script that tries a batch again, with the companion beside the model."""

    def __init__(self, loop, overlap=True):
        super().__init__("dcl", loop, dropout=0.0)
        options = {"weight": 0.7, "alpha": 0.4, "overlap": overlap}
        self.optimizer = DCLOptimizer(self.optimizer.base, self.model, **{"weight": 1.0} | options)


@LOOPS
@ACCIDENTS
def test_a_retried_batch_ends_where_the_serial_run_does(accident, loop):
    found, expected = Script(loop).run(accident), Script(loop, overlap=False).run()
    assert_same(found.snapshot(), expected.snapshot())


@LOOPS
@ACCIDENTS
def test_a_batch_given_up_leaves_no_trace(accident, loop):
    serial.give_up_a_batch(accident, Script(loop), Script(loop, overlap=False))


@ACCIDENTS
def test_an_accident_keeps_no_memory(accident):
    serial.require_no_memory_kept(accident, Script("plain"))


def test_a_forward_without_a_backward_frees_its_memory_with_its_output():
    model = mlp()
    optimizer = wrap(model, overlap=True)
    train(model, optimizer, batches(3))

    usual, output = surviving_tensors(), model(one()[0])
    assert surviving_tensors() > usual
    del output
    assert surviving_tensors() == usual


# ---- where the error comes out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "call"), [("forward", "model"), ("backward", "step"), ("backward", "forward"), ("backward", "copy")]
)
def test_an_error_in_the_companion_comes_out_with_its_traceback(place, call):
    script = Script("plain").run()
    script.optimizer.companion[2].fails_in = place
    x, y = one()
    calls = {
        "model": lambda: script.model(x),
        "forward": lambda: script.model(x),
        "step": script.optimizer.step,
        "copy": lambda: copy.deepcopy(script.optimizer),
    }
    script.optimizer.zero_grad()
    if place == "backward":
        F.cross_entropy(script.model(x), y).backward()
    with pytest.raises(torch.OutOfMemoryError, match="simulated") as caught:
        calls[call]()
    assert "out_of_memory" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_gradients_that_are_cleared_take_the_companions_error_along():
    """Serially that backward would not even have run."""
    script, calm = Script("plain").run(), Script("plain", overlap=False).run()
    script.optimizer.companion[2].fails_in = "backward"
    for either in (script, calm):
        torch.manual_seed(3)
        F.cross_entropy(either.model(one()[0]), one()[1]).backward()
        either.optimizer.zero_grad()
        either.attempt(*one(2), seed=3)
    assert_same(script.snapshot(), calm.snapshot())


class FailsOnce(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("no step today")
        return super().step(closure)


FailsOnce.__module__ = "torch.optim.tests"  # one of torch's own steps beside the model


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_the_companions_step_names_the_mend_and_the_next_step_is_another(overlap):
    """The model has stepped by then, as it has serially."""
    model, calm = mlp(), mlp()
    optimizer, expected = (
        DCLOptimizer(FailsOnce(m.parameters(), lr=0.1), m, overlap=o, weight=1.0)
        for m, o in ((model, overlap), (calm, False))
    )
    train(model, optimizer, batches(3))
    train(calm, expected, batches(3))
    for own in (optimizer, expected):
        own.companion_optimizer.fails = True
        with pytest.raises(RuntimeError, match=r"FailsOnce, could not step \(no step today\).*companion_optimizer="):
            train(own.model, own, batches(1, seed=8))
        train(own.model, own, batches(3, seed=9))
    assert_same(snapshot(optimizer), snapshot(expected))


def test_an_error_in_the_bases_step():
    """The companion has stepped beside it; a second call of step makes up for the model's."""
    model, calm, steps = mlp(), mlp(), []
    optimizer = DCLOptimizer(FailsOnce(model.parameters(), lr=0.1), model, overlap=True, weight=1.0)
    expected = DCLOptimizer(FailsOnce(calm.parameters(), lr=0.1), calm, weight=1.0)
    *others, last = batches(4)
    train(model, optimizer, others)
    train(calm, expected, [*others, last])
    before = copy.deepcopy(model)
    optimizer.companion_optimizer.register_step_pre_hook(lambda *_: steps.append(threading.current_thread().name))
    optimizer.base.fails = True
    with pytest.raises(ZeroDivisionError, match="no step today"):
        train(model, optimizer, [last])
    assert_same(model, before)
    optimizer.step()
    assert set(steps) == {"dcl_optim_0"}  # and once, or it would be elsewhere by now
    assert_same(snapshot(optimizer), snapshot(expected))


# ---- what is abandoned ----------------------------------------------------------------------------------------------


class Late(nn.Module):
    """In the companion, goes on only when it is let go, or after a while; in the model, fails as it is told to."""

    gate = threading.Event()
    gate.set()
    fails_with: type[BaseException] | None = None

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait(timeout=0.5)
        elif Late.fails_with is not None:
            raise Late.fails_with
        return x


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_companion_that_is_still_running_when_the_model_fails(error, monkeypatch):
    """Its converted weights must not stay in autocast's cache, nor its forward meet the next one."""

    def script(overlap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 12), Late(), nn.Tanh(), nn.Linear(12, CLASSES))
        optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, weight=5.0, overlap=overlap)
        for step, (x, y) in enumerate(batches(8, dtype=torch.float32)):
            optimizer.zero_grad()
            micro_batch(model, x, y)
            if step == 3:
                Late.gate.clear()
                monkeypatch.setattr(Late, "fails_with", error)
                with pytest.raises(error):
                    micro_batch(model, 2 * x, y)
                monkeypatch.setattr(Late, "fails_with", None)
                Late.gate.set()
            optimizer.step()
        return snapshot(optimizer)

    assert_same(script(True), script(False))


def micro_batch(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()


def test_an_interrupt_during_a_step_comes_at_once_and_a_loaded_state_is_continued():
    """The companion may have stepped in its thread by then."""
    model, calm = mlp(), mlp()
    optimizer, expected = wrap(model, overlap=True), wrap(calm)
    reached = []
    for x, y in batches(3):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        handles = [
            optimizer.base.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT)),
            optimizer.base.register_step_pre_hook(lambda *_: reached.append("the base's step")),
        ]
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, [(x, y)])
        for handle in handles:
            handle.remove()
        assert reached == []
        assert_same(model.state_dict(), before[0])
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        for own in (optimizer, expected):
            torch.manual_seed(2)
            train(own.model, own, [(x, y)])
        assert_same(snapshot(optimizer), snapshot(expected))


def test_an_interrupt_in_backward_leaves_both_before_the_step():
    model, calm = mlp(), mlp()
    optimizer, expected = wrap(model, overlap=True), wrap(calm)
    for own in (optimizer, expected):
        torch.manual_seed(2)
        train(own.model, own, batches(3))
    before = snapshot(optimizer)
    logits = model(one()[0])
    logits.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        F.cross_entropy(logits, one()[1]).backward()
    assert_same(snapshot(optimizer) | {"random": None}, before | {"random": None})
    for own in (optimizer, expected):
        torch.manual_seed(2)
        train(own.model, own, batches(3, seed=4))
    assert_same(snapshot(optimizer), snapshot(expected))
