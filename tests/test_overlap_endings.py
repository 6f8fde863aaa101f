"""overlap=True leaves no thread behind: after detaching, after errors, with the optimizer, with the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch.nn.functional as F

from tests.helpers import PATIENCE, batches, mlp, one, train, wrap
from tests.test_overlap_threads import Failure, overlapped


def trained():
    model = mlp()
    optimizer = wrap(model, overlap=True)
    train(model, optimizer, batches(3))
    return model, optimizer


def between_steps(model):
    pass


def after_a_forward(model):
    return model(one()[0])


def after_a_backward(model):
    F.cross_entropy(model(one()[0]), one()[1]).backward()


MOMENTS = (between_steps, after_a_forward, after_a_backward)


def test_detaching_ends_the_thread_at_once(new_threads):
    for moment in MOMENTS:
        model, optimizer = trained()
        moment(model)
        assert len(new_threads()) == 1
        optimizer.detach()
        assert new_threads() == [], moment


def test_wrapping_the_model_again_ends_the_thread(new_threads):
    model, optimizer = trained()
    second = wrap(model, overlap=True)
    assert new_threads() == []
    train(model, second, batches(2))
    assert len(new_threads()) == 1
    del optimizer


def test_an_optimizer_that_is_gone_takes_its_thread_along_without_the_collector(new_threads):
    for moment in MOMENTS:
        model, optimizer = trained()
        moment(model)
        gc.disable()
        try:
            (thread,) = new_threads()
            del optimizer
            thread.join(timeout=PATIENCE)
            assert new_threads() == [], moment
        finally:
            gc.enable()


def test_errors_leave_one_thread_at_most(new_threads):
    for place in ("forward", "backward", "step"):
        failure = Failure(place)
        optimizer = overlapped(failure)
        train(optimizer.model, optimizer, batches(2))
        for _ in range(5):
            failure.armed = True
            with pytest.raises(ZeroDivisionError):
                train(optimizer.model, optimizer, batches(1))
            failure.armed = False
        assert len(new_threads()) == 1
        optimizer.detach()
        assert new_threads() == [], place


def test_many_optimizers_in_turn_leave_no_thread(new_threads):
    for _ in range(20):
        trained()
    for thread in new_threads():
        thread.join(timeout=PATIENCE)
    assert new_threads() == []


EXITS = {
    "between forward and backward": ("z = model(x)", 0),
    "between backward and step": ("F.cross_entropy(model(x), y).backward()", 0),
    "by an exception inside the model": ("model[1].forward = lambda h: sys.exit(4); model(x)", 4),
}
SCRIPT = """
import os, sys, torch, torch._dynamo
import torch.nn.functional as F
from dcl_optim import DCLOptimizer

started = []
for statements in sys.argv[1:]:  # each in a process of its own, which all have this one's imports
    started.append(os.fork())
    if started[-1]:
        continue
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5))
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    x, y = torch.ones(8, 6), torch.zeros(8, dtype=torch.long)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    exec(statements)
    break
else:
    print(*(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started))
"""


def test_interpreters_end_in_the_middle_of_a_step_without_a_word():
    command = [sys.executable, "-c", SCRIPT, *(statements for statements, _ in EXITS.values())]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    codes = dict(zip(EXITS, process.stdout.split(), strict=True))
    assert codes == {name: str(code) for name, (_, code) in EXITS.items()}
    assert process.stderr == ""
