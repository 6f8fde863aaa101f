"""Batches that no step takes: skipped, cleared or left out; and what an error in the middle of a step leaves."""

import copy
import signal
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, one
from tests.reference import EACH, EACH_WAY, VARIANTS, assert_same_training, loss_of, wrap

# ---- batches that no step takes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleared", ["before the forward pass", "before the backward pass"])
@EACH_WAY
@EACH
def test_a_step_that_the_script_leaves_out_leaves_nothing(variant, way, cleared):
    """Lightning clears between forward and backward pass."""
    found = []
    for meets_it in (True, False):
        optimizer = wrap(variant, mlp())
        for index, (x, y) in enumerate(batches(6)):
            if index == 3 and not meets_it:
                continue
            if cleared == "before the forward pass":
                optimizer.zero_grad()
            loss = loss_of(optimizer, x, y, way)
            if cleared == "before the backward pass":
                optimizer.zero_grad()
            loss.backward()
            if index != 3:
                optimizer.step()
        found.append(optimizer)
    assert_same_training(*found)


# ---- errors in the middle of a step ----------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Runs out of memory once, in the pass that ``fails_in`` names."""

    def __init__(self):
        super().__init__()
        self.fails_in = None

    def forward(self, x):
        x = x * 1.0
        if self.fails_in == "forward":
            self.out_of_memory()
        if self.fails_in == "backward":
            x.register_hook(lambda gradient: self.out_of_memory())
        return x

    def out_of_memory(self):
        self.fails_in = None
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")


class Script:
    """A training script that tries a batch again when its memory ran out."""

    def __init__(self, variant, loop):
        torch.manual_seed(0)
        layers = (nn.Linear(FEATURES, 12), nn.Tanh(), Fragile(), nn.Dropout(0.3), nn.Linear(12, CLASSES))
        self.model, self.loop = nn.Sequential(*layers).double(), loop
        self.optimizer = wrap(variant, self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.fails_after = None

    def closure(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.fail("forward")
        loss.backward()
        self.fail("backward")
        return loss

    def fail(self, point):
        if self.fails_after == point:
            self.fails_after = None
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    def attempt(self, x, y, seed):
        torch.manual_seed(seed)
        if self.loop == "closure":
            self.optimizer.step(lambda: self.closure(x, y))
        else:
            self.closure(x, y)
            self.optimizer.step()

    def run(self, error=None, given_up=False):
        for step, (x, y) in enumerate(batches(6)):
            if step == 3 and error is not None:
                before = self.snapshot()
                ERRORS[error](self)
                with pytest.raises(torch.OutOfMemoryError):
                    self.attempt(*(one(99) if given_up else (x, y)), seed=step)
                assert_same(self.snapshot(), before)
            self.attempt(x, y, seed=step)
        return self

    def snapshot(self):
        found = copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        loss = found["optimizer"][self.optimizer._key]["loss"]
        loss["scale"] = round(loss["scale"], 9)  # an attempt reads it anew, and rounds it as the machine does
        return found


def in_model(place):
    return lambda script: setattr(script.model[2], "fails_in", place)


def in_companion(place):
    return lambda script: setattr(script.optimizer.companion[2], "fails_in", place)


def in_script(point):
    return lambda script: setattr(script, "fails_after", point)


def before_the_bases_step(script):
    def fail(*_):
        handle.remove()
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    handle = script.optimizer.base.register_step_pre_hook(fail)


ERRORS = {
    "in the model's forward": in_model("forward"),
    "in the companion's forward": in_companion("forward"),
    "between forward and backward": in_script("forward"),
    "in the model's backward": in_model("backward"),
    "in the companion's backward": in_companion("backward"),
    "between backward and step": in_script("backward"),
    "before the base's step": before_the_bases_step,
}
CASES = [(variant, error) for variant in VARIANTS for error in ERRORS if variant == "dcl" or "companion" not in error]
LOOPS = ["plain", "closure"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("variant", "error"), CASES)
def test_a_batch_that_is_tried_again_or_given_up_ends_where_an_undisturbed_run_does(variant, error, loop):
    """Scripts skip what does not fit into memory: the batch that fails is another one."""
    found = Script(variant, loop).run(error, given_up=loop == "plain")
    assert_same(found.snapshot(), Script(variant, loop).run().snapshot())


@pytest.mark.parametrize("loop", LOOPS)
@EACH
def test_after_ctrl_c_between_the_two_steps_the_forecaster_has_missed_one_batch(variant, loop):
    """It comes at once, as in the base optimizer alone. Without a loaded state the run goes on."""
    script, undisturbed = Script(variant, loop), Script(variant, loop)
    for step, batch in enumerate(batches(4)):
        if step == 3:
            before = script.snapshot()
            handle = script.optimizer.base.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) if step == 3 else nullcontext():
            script.attempt(*batch, seed=step)
        undisturbed.attempt(*batch, seed=step)
    handle.remove()
    own = script.optimizer._key
    expected = undisturbed.snapshot()
    expected["optimizer"][own] = before["optimizer"][own]
    assert_same(script.snapshot(), expected)

    undisturbed.optimizer.load_state_dict(expected["optimizer"])
    for step, batch in enumerate(batches(3, seed=4)):
        for each in (script, undisturbed):
            each.attempt(*batch, seed=10 + step)
    assert_same(script.snapshot(), undisturbed.snapshot())
