"""Which batches are in the gradients of a step: skipped ones, repeated backward passes, and what an error leaves."""

from __future__ import annotations

import copy
import functools
import signal
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.by_hand import VARIANTS, learned, wrap
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    backward,
    batches,
    dropout_net,
    mlp,
    one,
    surviving_tensors,
    train,
    training_forwards,
)

# ---- batches that no step takes --------------------------------------------------------------------------------------


def test_forward_without_backward_never_trains_the_companion_and_frees_its_memory():
    with_extra = []
    for use in (False, True):
        model = mlp()
        optimizer = wrap("dcl", model)
        forwards = training_forwards(optimizer)
        for x, y in batches(5):
            optimizer.zero_grad()
            if use:
                extra = model(x + 1.0)  # training mode, never followed by a backward
                forward = forwards[-1]
                graph = weakref.ref(forward().prediction.logits)
                del extra
                assert forward() is None
                assert graph() is None
            backward(model, x, y)
            optimizer.step()
        with_extra.append((model.state_dict(), learned(optimizer)))
    assert_same(*with_extra)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def test_a_step_that_a_gradient_scaler_skips_leaves_no_gradient_in_the_companion():
    """The companion's gradient is there when the model's backward ends, before the scaler finds the overflow."""
    runs = []
    for overflows in (False, True):
        model = mlp()
        optimizer = wrap("dcl", model, companion=mlp(seed=3))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        if overflows:
            handle = model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
            scaler.scale(F.cross_entropy(model(one(99)[0]), one(99)[1])).backward()
            handle.remove()
            assert None not in gradients(optimizer.companion)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.logs()["step"] == 0
        for x, y in batches(3):
            optimizer.zero_grad()
            z = model(x)
            assert gradients(optimizer.companion) == [None] * 4
            scaler.scale(F.cross_entropy(z, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*runs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("clear", ["optimizer first", "optimizer between"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_that_never_came_is_dropped_when_the_next_accumulation_begins(variant, clear):
    """Lightning clears between forward and backward pass: the same result as zero_grad first."""
    results = []
    for clears, skipped in (("optimizer first", False), (clear, True)):
        model = mlp()
        optimizer = wrap(variant, model)
        train(model, optimizer, batches(2, seed=5))
        if skipped:
            backward(model, *one(99))  # a gradient scaler found an infinity: no step
        for x, y in batches(5):
            if clears == "optimizer first":
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if clears == "optimizer between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


def test_a_closure_after_a_backward_whose_step_never_came():
    model, expected = mlp(), mlp()
    optimizer, calm = wrap("dcl", model), wrap("dcl", expected)
    backward(model, *one(x_seed=9))  # a script's guard against outliers leaves this step out
    x, y = one()

    def closure(network, chosen):
        chosen.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        return loss

    optimizer.step(lambda: closure(model, optimizer))
    calm.step(lambda: closure(expected, calm))
    assert_same(model, expected)
    assert_same(optimizer.companion, calm.companion)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_whose_gradients_are_cleared_before_an_unconditional_step_is_not_learned_from(variant, set_to_none):
    model = mlp()
    optimizer = wrap(variant, model)
    train(model, optimizer, batches(2))
    own = f"dcl_optim.{type(optimizer).__name__}"
    before = copy.deepcopy(optimizer.state_dict()[own]["forecaster"])
    x, y = next(batches(1, seed=7))
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.zero_grad(set_to_none)
    optimizer.step()
    assert_same(optimizer.state_dict()[own]["forecaster"], before)


# ---- several backward passes through one forward pass ----------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_counts_once_and_is_learned_from_once(variant):
    """As if its last backward had not come: the second one changes neither the companion nor the prototypes."""
    found = []
    for times in (1, 3):
        model = mlp()
        optimizer = wrap(variant, model, **{"companion": mlp(seed=1)} if variant == "dcl" else {})
        z = model(one()[0])
        for _ in range(times):
            optimizer.zero_grad()
            F.cross_entropy(z, one()[1]).backward(retain_graph=True)
        optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_kept_over_several_steps_is_refused(variant):
    model = mlp()
    optimizer = wrap(variant, model)
    x, y = one()
    loss = F.cross_entropy(model(x), y)
    parameter = model[-1].bias  # what lies behind a weight autograd refuses, since the step has changed that
    loss.backward(retain_graph=True, inputs=[parameter])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"(?s)before the last step.*\n  Fix: call the model in each step"):
        loss.backward(inputs=[parameter])


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_backwards_under_activation_checkpointing(variant):
    """The recomputation inside the second backward is no forward either."""
    found = []
    for checkpointed in (False, True):
        model = dropout_net()
        optimizer = wrap(variant, model)
        torch.manual_seed(0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            for part in (0.25, 0.75):
                (part * F.cross_entropy(z, y)).backward(retain_graph=True)
            optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def evaluated(model: nn.Sequential, optimizer: Any, x: Tensor, y: Tensor, asks: bool) -> Tensor:
    """What a script's closure does."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if asks:
        torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    loss.backward()
    return loss


def test_gradients_asked_for_in_a_closure():
    """Its gradients may be asked for there too; the closure's forward is learned from once."""
    found = []
    for asks in (False, True):
        model = mlp()
        optimizer = wrap("dcl", model, companion=mlp(seed=1))
        for x, y in batches(4):
            optimizer.step(functools.partial(evaluated, model, optimizer, x, y, asks))
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)


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


@pytest.mark.usefixtures("older_objects")
@pytest.mark.parametrize(("variant", "error"), CASES)
def test_an_error_keeps_no_memory(variant, error):
    """Counted after the next step, when everything of the failed attempt has to be gone."""
    script, data = Script(variant, "plain").run(), list(batches(3))
    script.attempt(*data[0], seed=0)
    usual = surviving_tensors()
    ERRORS[error](script)
    with pytest.raises(torch.OutOfMemoryError):
        script.attempt(*data[1], seed=1)
    script.attempt(*data[2], seed=2)
    assert surviving_tensors() == usual


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("variant", VARIANTS)
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


def test_random_streams_after_the_companions_error_are_those_of_the_models_forward():
    streams = []
    for fails in (True, False):
        script = Script("dcl", "plain")
        x, y = next(iter(batches(1)))
        torch.manual_seed(5)
        if fails:
            script.optimizer.companion[2].fails_in = "forward"
            with pytest.raises(torch.OutOfMemoryError):
                script.model(x)
        else:
            F.cross_entropy(script.model(x), y)
        streams.append(torch.get_rng_state())
    assert torch.equal(*streams)


def test_an_evaluation_after_an_error_is_left_alone():
    script = Script("dcp", "plain").run()
    script.model[2].fails_in = "forward"
    x, y = next(iter(batches(1)))
    with pytest.raises(torch.OutOfMemoryError):
        script.model(x)
    script.model.eval()
    assert torch.equal(script.model(x), script.model(x))
    script.model.train()
    F.cross_entropy(script.model(x), y).backward()
    script.optimizer.step()
