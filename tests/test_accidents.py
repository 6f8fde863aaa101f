"""Something raises in the middle of a step: nothing is half-stepped, and a retry ends where an undisturbed run does.

Ctrl-C is one of the accidents, as with any torch.optim optimizer: ``KeyboardInterrupt`` comes where it is pressed.
"""

from __future__ import annotations

import copy
import itertools
import signal
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, cells, mlp, sgd, surviving_tensors, train


class Fragile(nn.Module):
    """Runs out of memory where it is told to, once."""

    def __init__(self):
        super().__init__()
        self.fails_in = None

    def forward(self, x):
        x = x * 1.0
        if self.fails_in == "forward":
            self.out_of_memory()
        if self.fails_in == "backward":
            x.register_hook(lambda gradient: self.out_of_memory())
        if self.fails_in == "interrupted backward":
            x.register_hook(lambda gradient: self.press_ctrl_c())
        return x

    def out_of_memory(self):
        self.fails_in = None
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    def press_ctrl_c(self):
        self.fails_in = None
        press_ctrl_c()


def press_ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)


class Script:
    """A training script that tries a batch again when its memory ran out."""

    def __init__(self, variant, loop, dropout=0.3):
        torch.manual_seed(0)
        layers = (nn.Linear(FEATURES, 12), nn.Tanh(), Fragile(), nn.Dropout(dropout), nn.Linear(12, CLASSES))
        self.model, self.criterion, self.loop = nn.Sequential(*layers).double(), nn.CrossEntropyLoss(), loop
        base = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if variant == "dcl":
            self.optimizer = DCLOptimizer(base, self.model, weight=0.7, alpha=0.4)
        else:
            self.optimizer = DCPOptimizer(base, self.model, CLASSES, weight=0.7, alpha=0.4)
        self.fails_after = None

    def closure(self, x, y):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
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

    def run(self, accident=None):
        for step, (x, y) in enumerate(batches(6)):
            if step == 3 and accident is not None:
                before = self.snapshot()
                ACCIDENTS[accident](self)
                with pytest.raises(RAISED):
                    self.attempt(x, y, seed=step)
                assert_same(self.snapshot(), before)
            self.attempt(x, y, seed=step)
        return self

    def snapshot(self):
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


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


def interrupted_before_the_bases_step(script):
    def press(*_):
        handle.remove()
        press_ctrl_c()

    handle = script.optimizer.base.register_step_pre_hook(press)


ACCIDENTS = {
    "in the model's forward": in_model("forward"),
    "in the companion's forward": in_companion("forward"),
    "between forward and backward": in_script("forward"),
    "in the model's backward": in_model("backward"),
    "in the companion's backward": in_companion("backward"),
    "between backward and step": in_script("backward"),
    "before the base's step": before_the_bases_step,
    "Ctrl-C in the model's backward": in_model("interrupted backward"),
    "Ctrl-C before the base's step": interrupted_before_the_bases_step,
}
RAISED = (torch.OutOfMemoryError, KeyboardInterrupt)
CASES = [
    (variant, accident)
    for variant in ("dcl", "dcp")
    for accident in ACCIDENTS
    if variant == "dcl" or "companion" not in accident
]


LOOPS = ["plain", "closure"]
IN_EITHER_LOOP = [(*case, loop) for case in CASES for loop in LOOPS]


@pytest.mark.parametrize(("variant", "accident", "loop"), cells(IN_EITHER_LOOP, *IN_EITHER_LOOP[::3]))
def test_a_retried_batch_ends_where_an_undisturbed_run_does(variant, accident, loop):
    assert_same(Script(variant, loop).run(accident).snapshot(), Script(variant, loop).run().snapshot())


@pytest.mark.parametrize(("variant", "accident", "loop"), cells(IN_EITHER_LOOP, *IN_EITHER_LOOP[1::3]))
def test_a_batch_given_up_leaves_no_trace(variant, accident, loop):
    """As scripts do that skip what does not fit: the next batch is another one."""
    lost, never = Script(variant, loop), Script(variant, loop)
    for step, batch in enumerate(batches(6)):
        if step == 3:
            ACCIDENTS[accident](lost)
            with pytest.raises(RAISED):
                lost.attempt(*next(iter(batches(1, seed=99))), seed=77)
        for script in (lost, never):
            script.attempt(*batch, seed=step)
    assert_same(lost.snapshot(), never.snapshot())


@pytest.mark.usefixtures("older_objects")
@pytest.mark.parametrize(("variant", "accident"), cells(CASES, *CASES[::2]))
def test_an_accident_keeps_no_memory(variant, accident):
    """Counted after the next step, when everything of the failed attempt has to be gone."""
    script, data = Script(variant, "plain").run(), list(batches(3))
    script.attempt(*data[0], seed=0)
    usual = surviving_tensors()
    ACCIDENTS[accident](script)
    with pytest.raises(RAISED):
        script.attempt(*data[1], seed=1)
    script.attempt(*data[2], seed=2)
    assert surviving_tensors() == usual


def interrupted_after_the_bases_step(variant, loop):
    """A script whose fourth step was interrupted, and its state before that step."""
    script = Script(variant, loop)
    *first, (x, y) = batches(4)
    for step, batch in enumerate(first):
        script.attempt(*batch, seed=step)
    before = script.snapshot()
    handle = script.optimizer.base.register_step_post_hook(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        script.attempt(x, y, seed=3)
    handle.remove()
    return script, before


INTERRUPTED = list(itertools.product(["dcl", "dcp"], LOOPS))


@pytest.mark.parametrize(("variant", "loop"), INTERRUPTED)
def test_after_ctrl_c_between_the_two_steps_a_loaded_state_is_continued(variant, loop):
    script, before = interrupted_after_the_bases_step(variant, loop)
    script.model.load_state_dict(before["model"])
    script.optimizer.load_state_dict(before["optimizer"])
    for step, batch in list(enumerate(batches(6)))[3:]:
        script.attempt(*batch, seed=step)
    assert_same(script.snapshot(), Script(variant, loop).run().snapshot())


@pytest.mark.parametrize(("variant", "loop"), INTERRUPTED)
def test_after_ctrl_c_between_the_two_steps_the_forecaster_has_missed_one_batch(variant, loop):
    """It comes at once, as in the base optimizer alone. Without a loaded state the run goes on."""
    script, before = interrupted_after_the_bases_step(variant, loop)
    undisturbed = Script(variant, loop)
    for step, batch in enumerate(batches(4)):
        undisturbed.attempt(*batch, seed=step)
    own = f"dcl_optim.{type(script.optimizer).__name__}"
    expected = undisturbed.snapshot()
    expected["optimizer"][own] = before["optimizer"][own]
    assert_same(script.snapshot(), expected)

    undisturbed.optimizer.load_state_dict(expected["optimizer"])
    for step, batch in enumerate(batches(3, seed=4)):
        for each in (script, undisturbed):
            each.attempt(*batch, seed=10 + step)
    assert_same(script.snapshot(), undisturbed.snapshot())


def test_a_step_leaves_the_scripts_own_handler_of_ctrl_c_in_place():
    script, calls = Script("dcl", "plain"), []

    def press(*_):
        press_ctrl_c()
        calls.append("the base's step")

    script.optimizer.base.register_step_pre_hook(press)
    (x, y), _ = batches(2)
    previous = signal.signal(signal.SIGINT, lambda *_: calls.append("handler"))
    try:
        script.attempt(x, y, seed=0)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert calls == ["handler", "the base's step"]
    assert script.optimizer.logs()["step"] == 1


def test_random_streams_after_the_companions_accident_are_those_of_the_models_forward():
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


class FailsOnce(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("no step today")
        return super().step(closure)


def test_an_error_in_the_companions_step_names_the_mend_and_the_next_step_is_another():
    """The model has stepped by then."""
    optimizers = []
    for fails in (True, False):
        model = mlp()
        optimizer = DCLOptimizer(FailsOnce(model.parameters(), lr=0.1), model, weight=1.0)
        train(model, optimizer, batches(3))
        before = copy.deepcopy(optimizer.companion.state_dict())
        optimizer.companion_optimizer.fails = fails
        message = r"FailsOnce, could not step \(no step today\).*companion_optimizer="
        with pytest.raises(RuntimeError, match=message) if fails else nullcontext():
            train(model, optimizer, batches(1, seed=8))
        if not fails:  # the companion's step of that batch is all that the other run lacks
            optimizer.companion.load_state_dict(before)
        train(model, optimizer, batches(3, seed=9))
        optimizers.append(optimizer)
    failed, calm = optimizers
    assert_same(failed.model, calm.model)
    assert_same(failed.companion, calm.companion)


def test_an_evaluation_after_an_accident_is_left_alone():
    script = Script("dcp", "plain").run()
    script.model[2].fails_in = "forward"
    x, y = next(iter(batches(1)))
    script.optimizer.set_targets(y)
    with pytest.raises(torch.OutOfMemoryError):
        script.model(x)
    script.model.eval()
    assert torch.equal(script.model(x), script.model(x))
    script.model.train()
    script.optimizer.set_targets(y)  # again, as the batch is tried again
    F.cross_entropy(script.model(x), y).backward()
    script.optimizer.step()


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_detached_between_forward_and_backward(variant):
    """The model is as it was: the backward to come is the loss's alone."""
    script = Script(variant, "plain")
    first, (x, y) = batches(2)
    script.attempt(*first, seed=0)
    gradients = []
    for model in (script.model, copy.deepcopy(script.model)):
        model.zero_grad()
        torch.manual_seed(1)
        loss = F.cross_entropy(model(x), y)
        script.optimizer.detach()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_same(*gradients)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_an_empty_first_group(variant):
    def run(groups):
        torch.manual_seed(0)
        model, criterion = nn.Linear(FEATURES, CLASSES).double(), nn.CrossEntropyLoss()
        base = torch.optim.SGD([*groups, {"params": model.parameters()}], lr=0.1)
        optimizer = DCLOptimizer(base, model) if variant == "dcl" else DCPOptimizer(base, model, CLASSES)
        for x, y in batches(3):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return model.state_dict()

    assert_same(run([{"params": [], "weight_decay": 0.5}]), run([]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
def test_an_error_in_the_companions_forward_says_where_it_is_from():
    script = Script("dcl", "plain")
    (x, y), _ = batches(2)
    in_companion("forward")(script)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        script.attempt(x, y, seed=0)
    assert ["optimizer.companion" in note for note in caught.value.__notes__] == [True]
    in_model("forward")(script)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        script.attempt(x, y, seed=0)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_stepping_twice_names_its_cause(variant):
    script = Script(variant, "plain")
    (x, y), other = batches(2)
    script.attempt(x, y, seed=0)
    before = script.snapshot()
    with pytest.raises(RuntimeError, match=r"step was called again.*Call step once for each backward"):
        script.optimizer.step()
    assert_same(script.snapshot(), before)
    script.attempt(*other, seed=1)
    script.model.eval()
    script.closure(*other)
    with pytest.raises(RuntimeError, match=r"step found gradients.*the model was in eval mode"):
        script.optimizer.step()


@pytest.mark.parametrize("given", [False, True])
def test_a_loss_of_some_rows_is_about_their_labels(given):
    script = Script("dcp", "plain", dropout=0.0)
    x, y = next(iter(batches(1)))
    mask = torch.arange(len(x)) < 10
    script.optimizer.zero_grad()
    if given:
        script.optimizer.set_targets(y.where(mask, -100))
    z = script.model(x)
    script.criterion(z[mask], y[mask]).backward()
    script.optimizer.step()
    for k in y[mask].unique():
        assert_same(script.optimizer.prototypes[k], z[mask][y[mask] == k].detach().mean(0), atol=1e-12)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_input_that_is_overwritten_before_the_step_names_its_cause():
    (x, y), (other, _) = batches(2)
    buffer = x.clone()
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES).double())
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    F.cross_entropy(model(buffer), y).backward()
    buffer.copy_(other)
    with pytest.raises(RuntimeError, match="inplace operation") as found:
        optimizer.step()
    assert "dcl_optim's companion" in found.value.__notes__[0]
    assert "after step(), or pass on a copy" in found.value.__notes__[0]


class Stateful(nn.Module):
    """Keeps its hidden state in an attribute, which the script detaches after each chunk of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        output, self.hidden = self.rnn(x, self.hidden)
        return self.head(output)


@pytest.mark.parametrize("detaches", [False, True])
def test_a_hidden_state_in_an_attribute_of_the_companion_is_named(detaches):
    model = Stateful()
    optimizer = DCLOptimizer(sgd(model), model)

    def chunk() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, 5, 3)).flatten(0, 1), torch.randint(4, (10,))).backward()
        optimizer.step()
        model.hidden = model.hidden.detach()
        if detaches:
            optimizer.companion.hidden = optimizer.companion.hidden.detach()

    chunk()
    if detaches:
        chunk()
        return
    with pytest.raises(RuntimeError, match="a second time") as caught:
        chunk()
    if hasattr(caught.value, "__notes__"):  # from Python 3.11 on
        assert "it has to do so on optimizer.companion too" in caught.value.__notes__[0]
