"""The companion's optimizer: what it is built of, whose options it follows, and what it counts by itself."""

import copy
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim.distances import mse
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    assert_same_networks,
    batches,
    fit,
    matrices_and_others,
    mlp,
    resume,
    sgd,
    train,
    wrap,
)
from tests.reference import CLOSE, assert_same_training

# ---- how it is built -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [lambda groups: groups.pop(0), list.reverse])
def test_groups_that_are_removed_or_change_places_have_their_own_options_in_a_new_copy(change, frozen):
    model = mlp()
    model[0].requires_grad_(not frozen)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = wrap(model, torch.optim.SGD(groups))
    fit(optimizer, batches(2))
    change(optimizer.param_groups)
    with pytest.warns(UserWarning, match="copied from the model again"):
        fit(optimizer, batches(1))
    mirrored = optimizer.companion_optimizer.param_groups
    assert [group["lr"] for group in mirrored] == [group["lr"] for group in optimizer.param_groups]
    trained = {id(p) for p in optimizer.companion[2].parameters()}
    assert {id(p) for group in mirrored if group["lr"] == 0.01 for p in group["params"]} == trained


def test_companion_optimizer_of_its_own():
    optimizer = wrap(mlp(), companion_optimizer=partial(torch.optim.AdamW, lr=0.02))
    assert isinstance(optimizer.companion_optimizer, torch.optim.AdamW)
    optimizer.param_groups[0]["lr"] = 0.7
    fit(optimizer, batches(2))
    assert optimizer.companion_optimizer.param_groups[0]["lr"] == 0.02


def test_a_companions_optimizer_of_other_parameters_than_it_gets_is_refused() -> None:
    """Of a companion in half precision it would not step the weights of float32."""
    model, companion = mlp(dtype=torch.bfloat16), mlp(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="of the parameters that it gets, and of no others"):
        wrap(model, companion=companion, companion_optimizer=lambda _: sgd(companion))


class Muon(torch.optim.Optimizer):
    """Takes groups of exactly its keys, as implementations of Muon do."""

    def __init__(self, groups):
        for group in groups:
            assert group.keys() == {"params", "lr", "use_muon"}
            group["params"] = sorted(group["params"], key=lambda parameter: parameter.numel(), reverse=True)
        super().__init__(groups, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad.sign()


def test_a_base_that_asserts_its_keys_under_a_scheduler_has_a_companion():
    """Schedulers put keys of theirs into the groups, before the copy is made and later."""
    model = mlp()
    groups = [{"params": list(layer.parameters()), "lr": 0.01, "use_muon": True} for layer in (model[2], model[0])]
    optimizer = wrap(model, Muon(groups))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=9, cycle_momentum=False)
    for batch in batches(5):
        fit(optimizer, [batch])
        scheduler.step()
    torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    fit(optimizer, batches(1))
    theirs, ours = (one.param_groups for one in (optimizer, optimizer.companion_optimizer))
    of_schedulers = {"initial_lr", "max_lr", "min_lr", "swa_lr"}
    for group, mirrored in zip(theirs, ours, strict=True):
        assert of_schedulers < group.keys()
        assert group["lr"] == mirrored["lr"] != 0.01
        assert [p.shape for p in mirrored["params"]] == [p.shape for p in group["params"]]


class HoldsOthers(torch.optim.Optimizer):
    """Gives each of its groups to an optimizer that it holds, and keeps the first groups for the schedule."""

    def __init__(self, groups, kept_as):
        super().__init__(groups, {"lr": 0.1})
        inner = [torch.optim.SGD([group], momentum=0.9) for group in self.param_groups]
        if kept_as == "list":
            self.all = inner
        elif kept_as == "dictionary":
            self.all = {"of": {"matrices": inner[0], "others": (inner[1],)}}
        else:
            setattr(self, kept_as, inner[0])
            self.other = inner[1]
        self.names = ["matrices"]  # which its step needs, and torch's own copies of optimizers lose
        self.kept_as = kept_as

    def _inner(self):
        if self.kept_as == "list":
            return self.all
        if self.kept_as == "dictionary":
            return [self.all["of"][self.names[0]], *self.all["of"]["others"]]
        return [getattr(self, self.kept_as), self.other]

    def step(self, closure=None):
        for one in self._inner():
            one.step()


class HandsOn(torch.optim.Optimizer):
    """Hands all but its step on to the optimizer that it holds, as those of averages of weights do."""

    def __init__(self, base):
        self.inner = base

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def groups_by_shape(model):
    matrices, others = matrices_and_others(model)
    return [{"params": matrices, "lr": 0.1}, {"params": others, "lr": 0.05}]


@pytest.mark.parametrize("kept_as", ["muon", "optim", "base_optimizer", "list", "dictionary", "handed on"])
def test_the_optimizers_that_a_base_holds_follow_its_schedule_in_the_companion_too(kept_as):
    """As one optimizer with these groups does, bit for bit."""
    runs = []
    for holds in (True, False):
        model = mlp()
        base = torch.optim.SGD(groups_by_shape(model), momentum=0.9)
        if holds:
            base = HandsOn(base) if kept_as == "handed on" else HoldsOthers(groups_by_shape(model), kept_as)
        optimizer = wrap(model, base, alpha=0.6)
        assert type(optimizer.companion_optimizer) is type(base)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        for batch in batches(10):
            fit(optimizer, [batch])
            scheduler.step()
        runs.append(optimizer)
    assert_same_training(*runs)


@pytest.mark.parametrize("kept_as", ["muon", "list", "dictionary"])
def test_those_that_have_stepped_begin_without_their_state_in_the_companion(kept_as):
    model = mlp()
    base = HoldsOthers(groups_by_shape(model), kept_as)
    train(model, base, batches(2))
    before = copy.deepcopy([one.state_dict() for one in base._inner()])
    optimizer = wrap(model, base)
    assert not any(one.state for one in optimizer.companion_optimizer._inner())
    assert_same([one.state_dict() for one in base._inner()], before)


class Container(torch.optim.Optimizer):
    """Steps two optimizers with groups of their own, which the script schedules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.held = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]

    def step(self, closure=None):
        for one in self.held:
            one.step()


class Holding(torch.optim.SGD):
    """Holds something that no copy can be made of."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.lock = threading.Lock()


class NeedsMore(torch.optim.SGD):
    """Its constructor takes what no one but the script knows, and works once."""

    is_made = False

    def __init__(self, params, extra):
        assert not self.is_made
        super().__init__(params, lr=0.1 * extra, momentum=0.9)
        type(self).is_made = True


def test_a_base_is_copied_whatever_its_constructor_takes():
    model, expected = mlp(), mlp()
    optimizer = wrap(model, NeedsMore(model.parameters(), extra=1))
    other = wrap(expected)
    fit(optimizer, batches(5))
    fit(other, batches(5))
    assert type(optimizer.companion_optimizer) is NeedsMore
    assert_same_networks(optimizer, other)


class OfAScript(torch.optim.Adam):
    """Of another package than torch's optimizers, whose state may come from a constructor."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, OfAScript])
def test_the_copy_of_a_base_that_has_stepped_starts_without_its_state_and_shares_none_of_it(kind):
    model = mlp()
    base = kind(model.parameters(), lr=0.01)
    train(model, base, batches(3))
    before = copy.deepcopy(base.state_dict())
    optimizer = wrap(model, base)
    assert not optimizer.companion_optimizer.state
    assert_same(base.state_dict(), before)
    fit(optimizer, batches(2))
    for theirs, ours in zip(model.parameters(), optimizer.companion.parameters(), strict=True):
        assert float(base.state[theirs]["step"]) == 5
        assert float(optimizer.companion_optimizer.state[ours]["step"]) == 1  # the first gradient is zero


class StateFromTheStart(torch.optim.SGD):
    """Makes its state in its constructor, as apollo-torch and torch_optimizer's MADGRAD do."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= 0.1 * self.state[parameter]["mean"].lerp_(parameter.grad, 0.1)


def test_a_state_of_the_constructor_which_a_copy_lacks_is_an_error_with_a_note_in_its_first_step():
    model = mlp()
    optimizer = wrap(model, StateFromTheStart(model.parameters()))
    fit(optimizer, batches(1))  # the first gradient is zero
    with pytest.raises(KeyError, match="mean") as caught:
        fit(optimizer, batches(1))
    if sys.version_info >= (3, 11):
        assert "the companion's optimizer: pass companion_optimizer=" in caught.value.__notes__[0]


def test_an_optimizer_of_sparse_gradients_that_has_stepped_is_no_such_one():
    model = nn.Embedding(FEATURES, CLASSES, sparse=True)
    base = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    data = [(torch.arange(FEATURES), torch.arange(FEATURES) % CLASSES)] * 3
    train(model, base, data)
    optimizer = wrap(model, base)
    fit(optimizer, data)
    state = optimizer.companion_optimizer.state[optimizer.companion.weight]
    assert float(state["step"]) == 2  # the first gradient is zero


class StepsByItself(torch.optim.Optimizer):
    """Has tables of hooks, but not torch's constructor, as timm's Lookahead."""

    def __init__(self, inner):
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.defaults = inner.defaults

    def step(self, closure=None):
        return self.inner.step(closure)


def test_making_a_companions_optimizer_does_not_change_the_class_of_the_base():
    model = mlp()
    step = StepsByItself.step
    optimizer = wrap(model, StepsByItself(sgd(model)))
    assert optimizer.companion_optimizer is not None
    assert StepsByItself.step is step


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot train the companion"),
        (Container, "the Container holds a SGD with other groups, whose options the companion cannot follow"),
        (lambda model: Holding(model.parameters()), r"the Holding could not be copied .*lock"),
    ],
)
def test_what_cannot_train_a_companion_is_refused_at_wrapping(base, message):
    model = mlp()
    made = base(model)
    with pytest.raises(ValueError, match=rf"{message}.*companion_optimizer="):
        wrap(model, made)
    assert not model._forward_hooks
    optimizer = wrap(model, made, companion_optimizer=partial(torch.optim.SGD, lr=0.1))
    assert type(optimizer.companion_optimizer) is torch.optim.SGD


# ---- what it follows, and what it counts -----------------------------------------------------------------------------


class CountsInItsGroups(torch.optim.SGD):
    """Its own bookkeeping in the groups: a number, and a tensor that it counts up in place."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group |= {"count": 0, "total": torch.zeros(())}

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["total"].add_(1)
        return super().step(closure)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_what_an_optimizer_counts_in_its_groups_is_its_own_and_what_the_script_sets_is_shared(tensor_lr):
    model = mlp()
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = wrap(model, CountsInItsGroups(model.parameters(), lr=lr), companion_lr_scale=0.5)
    ours, theirs = optimizer.param_groups[0], optimizer.companion_optimizer.param_groups[0]
    for steps, batch in enumerate(batches(4), start=1):
        if steps == 3:
            if tensor_lr:
                ours["lr"].fill_(0.04)
            else:
                ours["lr"] = 0.04
            ours["momentum"] = 0.5
        fit(optimizer, [batch])
        counted = (ours["count"], theirs["count"], float(ours["total"]), float(theirs["total"]))
        assert counted == (steps, steps - 1, steps, steps - 1)  # a copy's first gradient is zero
        assert float(theirs["lr"]) == pytest.approx(0.02 if steps >= 3 else 0.05)
        assert theirs["momentum"] == (0.5 if steps >= 3 else 0.9)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    fit(optimizer, batches(1))
    assert (optimizer.companion_optimizer.param_groups[0]["count"], optimizer.param_groups[0]["count"]) == (4, 5)


class DividesByTheFirst(torch.optim.SGD):
    """Divides each gradient by the size of the first, as AdamS and ADOPT by an average of it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                first = self.state[parameter].setdefault("first", parameter.grad.abs().max() + 1e-9)
                parameter.data -= group["lr"] * parameter.grad / first


@pytest.mark.parametrize("way", ["copied", "made by the script"])
@pytest.mark.parametrize("still", [0, 3])
def test_the_companions_optimizer_begins_with_the_first_gradient_that_is_not_zero(way, still):
    """A copy of the model begins with zeros; more of them come while the learning rate is 0."""
    model, hand = mlp(), mlp()
    companion = copy.deepcopy(hand)
    make = partial(DividesByTheFirst, lr=0.01)
    optimizer = wrap(model, make(model.parameters()), alpha=0.6, companion_optimizer=None if way == "copied" else make)
    optimizers = [make(hand.parameters()), make(companion.parameters())]
    for number, (x, y) in enumerate(batches(still + 6)):
        rate = 0.0 if number < still else 0.01
        for one in (optimizer, *optimizers):
            one.param_groups[0]["lr"] = rate
        z, c = hand(x), companion(x)
        hand.zero_grad()
        (F.cross_entropy(z, y) + mse(z, c.detach()).mean()).backward()
        optimizers[0].step()
        companion.zero_grad()
        mse(c, c.detach() + 0.4 * (z - c).detach()).mean().backward()
        if number > still:
            optimizers[1].step()
        fit(optimizer, [(x, y)])
    assert_same((model, optimizer.companion), (hand, companion), atol=1e-12)
    assert (optimizer.companion[0].weight - mlp()[0].weight).abs().max() < 0.1


def test_a_companions_optimizer_that_has_begun_steps_with_gradients_of_zero_also_when_resumed():
    """Its weight decay goes on where alpha = 1 leaves no gradient."""
    model, resumed = mlp(), mlp()
    optimizer, second = (
        wrap(network, sgd(network, weight_decay=0.1, momentum=0.0), alpha=lambda t: 0.5 if t < 4 else 1.0)
        for network in (model, resumed)
    )
    data = list(batches(7))
    train(model, optimizer, data[:3])
    resume(second, optimizer)
    before = copy.deepcopy(optimizer.companion)
    train(model, optimizer, data[3:])
    train(resumed, second, data[3:])
    assert_same_networks(optimizer, second)
    assert not torch.equal(before[0].weight, optimizer.companion[0].weight)


def test_sparse_gradients_train_as_dense_ones():
    """Those of several backward passes are added up without being coalesced."""
    runs = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(10, FEATURES, sparse=sparse), nn.Linear(FEATURES, CLASSES)).double()
        optimizer = wrap(model)
        data = [(torch.randint(10, (8, 3)), torch.randint(CLASSES, (8,))) for _ in range(6)]
        for x, y in data:
            optimizer.zero_grad()
            for rows, labels in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.cross_entropy(model(rows), labels) / 2).backward()
            assert optimizer.companion[0].weight.grad.is_sparse == sparse
            optimizer.step()
        runs.append(optimizer)
    assert_same_training(*runs, **CLOSE)


# ---- errors ----------------------------------------------------------------------------------------------------------


class FailsOnce(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("no step today")
        return super().step(closure)


def test_an_error_in_the_companions_step_has_a_note_with_the_fix_and_the_next_step_is_another():
    """It may be the script's, as that of an alarm; the model has stepped by then."""
    optimizers = []
    for fails in (True, False):
        model = mlp()
        optimizer = wrap(model, FailsOnce(model.parameters(), lr=0.1))
        fit(optimizer, batches(3))
        before = copy.deepcopy(optimizer.companion.state_dict())
        optimizer.companion_optimizer.fails = fails
        with pytest.raises(ZeroDivisionError, match="no step today") if fails else nullcontext() as caught:
            fit(optimizer, batches(1, seed=8))
        if fails and sys.version_info >= (3, 11):
            assert "the companion's optimizer: pass companion_optimizer=" in caught.value.__notes__[0]
        if not fails:  # the companion's step of that batch is all that the other run lacks
            optimizer.companion.load_state_dict(before)
        fit(optimizer, batches(3, seed=9))
        optimizers.append(optimizer)
    failed, calm = optimizers
    assert_same_networks(failed, calm)


def test_the_companion_follows_a_learning_rate_that_becomes_a_tensor():
    """As when a checkpoint of a plain run with such a learning rate is loaded into the base."""
    optimizer = wrap(mlp(), companion_lr_scale=0.5)
    fit(optimizer, batches(1))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.04)
    fit(optimizer, batches(1))
    optimizer.param_groups[0]["lr"].fill_(0.08)
    fit(optimizer, batches(1))
    assert float(optimizer.companion_optimizer.param_groups[0]["lr"]) == pytest.approx(0.04)
