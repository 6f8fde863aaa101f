"""overlap=True when something raises: the caller sees it, and a retry ends where the serial run does.

Weaker than the serial way in one thing: when the model's forward fails, the companion's batch-norm statistics have seen
the batch.
"""

from __future__ import annotations

import copy
import os
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
    PATIENCE,
    assert_same,
    batches,
    cells,
    mlp,
    one,
    snapshot,
    surviving_tensors,
    train,
    wrap,
)


class Script(serial.Script):
    """The training script that tries a batch again, with the companion running concurrently."""

    def __init__(self, loop, overlap=True):
        super().__init__("dcl", loop, dropout=0.0)
        options = {"weight": 0.7, "alpha": 0.4, "overlap": overlap}
        self.optimizer = DCLOptimizer(self.optimizer.base, self.model, **{"weight": 1.0} | options)


@pytest.mark.parametrize(
    "accident",
    cells(
        serial.ACCIDENTS,
        *("in the model's forward", "in the companion's forward", "in the companion's backward"),
        *("between backward and step", "Ctrl-C in the model's backward"),
    ),
)
def test_a_batch_that_is_retried_or_given_up_leaves_no_trace(accident):
    for loop in ("plain", "closure"):
        found, expected = Script(loop).run(accident), Script(loop, overlap=False).run()
        assert_same(found.snapshot(), expected.snapshot())
        serial.give_up_a_batch(accident, Script(loop), Script(loop, overlap=False))


@pytest.mark.usefixtures("older_objects")
def test_accidents_keep_no_memory():
    for accident in serial.ACCIDENTS:
        serial.require_no_memory_kept(accident, Script("plain"))


@pytest.mark.usefixtures("older_objects")
def test_a_forward_without_a_backward_frees_its_memory_with_its_output():
    model = mlp()
    optimizer = wrap(model, overlap=True)
    train(model, optimizer, batches(3))

    optimizer.forecaster.close()  # a worker drops its last piece of work when it likes
    usual, output = surviving_tensors(), model(one()[0])
    assert surviving_tensors() > usual
    del output
    optimizer.forecaster.close()
    assert surviving_tensors() == usual


# ---- where the error comes out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "call"), [("forward", "model"), ("backward", "step"), ("backward", "copy")])
def test_an_error_in_the_companion_comes_out_with_its_traceback(place, call):
    script = Script("plain").run()
    script.optimizer.companion[2].fails_in = place
    x, y = one()
    calls = {
        "model": lambda: script.model(x),
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


# ---- in a forked child ----------------------------------------------------------------------------------------------


def in_a_fork(function):
    """Call a function in a child that this process forks; raise what it has raised."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(int(PATIENCE))  # of a child that hangs
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_trains_on_and_so_does_its_parent():
    """The worker's thread stays with the parent."""

    def go_on():
        train(model, optimizer, batches(3, seed=7))
        assert_same(snapshot(optimizer), expected)

    model, calm = mlp(), mlp()
    optimizer, serial = wrap(model, overlap=True), wrap(calm)
    train(model, optimizer, batches(3))
    train(calm, serial, batches(3))
    train(calm, serial, batches(3, seed=7))
    expected = snapshot(serial)
    in_a_fork(go_on)
    go_on()


def test_a_process_that_is_forked_within_a_step_says_so_and_can_begin_anew():
    def go_on():
        with pytest.raises(RuntimeError, match="this process was forked in the middle of a training step"):
            optimizer.step()
        train(model, optimizer, batches(2))
        optimizer.detach()

    def wait(*_):
        if os.getpid() == parent:
            gate.wait(PATIENCE)

    model = mlp()
    optimizer = wrap(model, overlap=True)
    train(model, optimizer, batches(2))
    gate, parent = threading.Event(), os.getpid()
    optimizer.companion.register_full_backward_pre_hook(wait)
    F.cross_entropy(model(one()[0]), one()[1]).backward()
    in_a_fork(go_on)
    gate.set()
    optimizer.step()
