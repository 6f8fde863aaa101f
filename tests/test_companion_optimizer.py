"""The companion's optimizer: what it is built of, whose options it follows, and what it counts by itself."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, train, wrap

# ---- how it is built -------------------------------------------------------------------------------------------------


def test_several_groups_are_mirrored_by_name():
    model = mlp()
    groups = [{"params": [model[2].weight, model[2].bias], "lr": 0.5}, {"params": model[0].parameters(), "lr": 0.01}]
    optimizer = DCLOptimizer(torch.optim.SGD(groups, momentum=0.9), model, weight=1.0)
    mirrored = optimizer.companion_optimizer.param_groups
    assert [group["lr"] for group in mirrored] == [0.5, 0.01]
    assert {id(p) for p in mirrored[0]["params"]} == {id(p) for p in optimizer.companion[2].parameters()}
    assert {id(p) for p in mirrored[1]["params"]} == {id(p) for p in optimizer.companion[0].parameters()}
    optimizer.param_groups[1]["lr"] = 0.0
    before = copy.deepcopy(optimizer.companion)
    train(model, optimizer, batches(3))
    assert_same(optimizer.companion[0], before[0])
    assert not torch.equal(optimizer.companion[2].weight, before[2].weight)


@pytest.mark.parametrize("change", [lambda groups: groups.pop(0), lambda groups: groups.pop(), list.reverse])
def test_groups_that_are_removed_or_change_places_are_refused_before_anything_changes(change):
    """The companion's groups would take one another's options."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = DCLOptimizer(torch.optim.SGD(groups), model, weight=1.0)
    train(model, optimizer, batches(2))
    before = copy.deepcopy((model.state_dict(), optimizer.companion.state_dict()))
    change(optimizer.param_groups)
    with pytest.raises(RuntimeError, match=r"removed or changed places.*wrap the model again"):
        train(model, optimizer, batches(1))
    with pytest.raises(RuntimeError, match="wrap the model again"):
        optimizer.add_param_group({"params": nn.Parameter(torch.ones(()))})
    assert_same((model.state_dict(), optimizer.companion.state_dict()), before)
    again = DCLOptimizer(optimizer.base, model, weight=1.0)
    train(model, again, batches(2))
    mirrored = again.companion_optimizer.param_groups
    assert [group["lr"] for group in mirrored] == [group["lr"] for group in again.param_groups]


def test_companion_optimizer_of_its_own():
    model = mlp()
    optimizer = wrap(model, companion_optimizer=partial(torch.optim.AdamW, lr=0.02))
    assert isinstance(optimizer.companion_optimizer, torch.optim.AdamW)
    optimizer.param_groups[0]["lr"] = 0.7
    train(model, optimizer, batches(2))
    assert optimizer.companion_optimizer.param_groups[0]["lr"] == 0.02

    given = nn.Linear(FEATURES, CLASSES).double()
    own = torch.optim.Adam(given.parameters(), lr=0.3)
    model = mlp()
    optimizer = wrap(model, companion=given, companion_optimizer=own)
    assert optimizer.companion_optimizer is own
    train(model, optimizer, batches(2))
    assert own.state


class NeedsMore(torch.optim.SGD):
    def __init__(self, params: Any, extra: int) -> None:
        super().__init__(params, lr=0.1)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot train the companion"),
        (lambda model: NeedsMore(model.parameters(), extra=1), "a second NeedsMore for the companion could not be"),
    ],
)
def test_what_cannot_train_a_companion_is_refused_at_wrapping(base: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=rf"{message}.*companion_optimizer="):
        DCLOptimizer(base(model), model)
    assert not model._forward_hooks
    optimizer = DCLOptimizer(base(model), model, companion_optimizer=partial(torch.optim.SGD, lr=0.1))
    assert type(optimizer.companion_optimizer) is torch.optim.SGD


def test_a_model_without_trained_parameters_is_refused_at_wrapping() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        wrap(model)


# ---- what it follows, and what it counts -----------------------------------------------------------------------------


SCALED_IN_PART = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=1e-3),
}


@pytest.mark.parametrize("name", SCALED_IN_PART)
def test_alpha_shapes_the_target_and_leaves_the_learning_rate(name):
    """The paper, literally: the base's class and rate, and the gradient of the distance to the target."""
    make = SCALED_IN_PART[name]
    model, hand, companion = mlp(), mlp(), mlp(seed=3)
    optimizer = DCLOptimizer(make(model.parameters()), model, companion=copy.deepcopy(companion), weight=2.0, alpha=0.6)
    base, second = make(hand.parameters()), make(companion.parameters())
    for x, y in batches(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

        z, c = hand(x), companion(x)
        base.zero_grad()
        (F.cross_entropy(z, y) + 2.0 * F.mse_loss(z, c.detach())).backward()
        base.step()
        second.zero_grad()
        F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()).backward()
        second.step()
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-10)
    assert_same(model, hand, rtol=1e-9, atol=1e-10)


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
    optimizer = DCLOptimizer(CountsInItsGroups(model.parameters(), lr=lr), model, companion_lr_scale=0.5, weight=1.0)
    ours, theirs = optimizer.param_groups[0], optimizer.companion_optimizer.param_groups[0]
    for steps, batch in enumerate(batches(4), start=1):
        if steps == 3:
            if tensor_lr:
                ours["lr"].fill_(0.04)
            else:
                ours["lr"] = 0.04
            ours["momentum"] = 0.5
        train(model, optimizer, [batch])
        assert (ours["count"], theirs["count"], float(ours["total"]), float(theirs["total"])) == (steps,) * 4
        assert float(theirs["lr"]) == pytest.approx(0.02 if steps >= 3 else 0.05)
        assert theirs["momentum"] == (0.5 if steps >= 3 else 0.9)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(1))
    assert optimizer.companion_optimizer.param_groups[0]["count"] == optimizer.param_groups[0]["count"] == 5


def test_a_companion_that_steps_less_often_counts_its_own_steps():
    model = mlp()
    optimizer = DCLOptimizer(CountsInItsGroups(model.parameters()), model, companion_every=2)
    train(model, optimizer, batches(5))
    ours, theirs = optimizer.param_groups[0], optimizer.companion_optimizer.param_groups[0]
    assert (ours["count"], theirs["count"], float(ours["total"]), float(theirs["total"])) == (5, 2, 5.0, 2.0)


@pytest.mark.integration
def test_the_optimizers_mode_is_the_companions_from_its_start() -> None:
    from schedulefree import SGDScheduleFree

    found = []
    for companion in (None, mlp()):
        model = mlp()
        optimizer = DCLOptimizer(SGDScheduleFree(model.parameters(), lr=0.1), model, companion=companion, weight=1.0)
        optimizer.train()
        train(model, optimizer, batches(5))
        optimizer.eval()
        found.append((model, optimizer.companion))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("parts", [1, 2])
def test_sparse_gradients_train_as_dense_ones(parts: int) -> None:
    """Those of several backward passes are added up without being coalesced."""
    runs = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(10, FEATURES, sparse=sparse), nn.Linear(FEATURES, CLASSES)).double()
        optimizer = wrap(model)
        data = [(torch.randint(10, (8, 3)), torch.randint(CLASSES, (8,))) for _ in range(6)]
        for x, y in data:
            optimizer.zero_grad()
            for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(rows), labels) / parts).backward()
            assert optimizer.companion[0].weight.grad.is_sparse == sparse
            optimizer.step()
        runs.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*runs, rtol=1e-12, atol=1e-14)


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
        optimizer = DCLOptimizer(FailsOnce(model.parameters(), lr=0.1), model, weight=1.0)
        train(model, optimizer, batches(3))
        before = copy.deepcopy(optimizer.companion.state_dict())
        optimizer.companion_optimizer.fails = fails
        with pytest.raises(ZeroDivisionError, match="no step today") if fails else nullcontext() as caught:
            train(model, optimizer, batches(1, seed=8))
        if fails and hasattr(caught.value, "__notes__"):  # from Python 3.11 on
            assert "the companion's optimizer: pass companion_optimizer=" in caught.value.__notes__[0]
        if not fails:  # the companion's step of that batch is all that the other run lacks
            optimizer.companion.load_state_dict(before)
        train(model, optimizer, batches(3, seed=9))
        optimizers.append(optimizer)
    failed, calm = optimizers
    assert_same(failed.model, calm.model)
    assert_same(failed.companion, calm.companion)


class Hooking(torch.optim.SGD):
    """Halves the gradients by hooks on the parameters, and takes no learning rate of 0."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            if not group["lr"]:
                raise ValueError("lr must be positive")
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient / 2)


def test_a_constructor_gets_each_parameter_of_the_companion_once() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = DCLOptimizer(Hooking(model.parameters()), model)
    train(model, optimizer, batches(1))
    model[2].requires_grad_(True)
    train(model, optimizer, batches(1))
    assert [len(layer.weight._backward_hooks) for layer in optimizer.companion if isinstance(layer, nn.Linear)] == [
        1,
        1,
    ]


def test_a_group_that_the_companions_optimizer_cannot_follow_is_not_added() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = DCLOptimizer(Hooking(model[0].parameters()), model)
    train(model, optimizer, batches(1))
    optimizer.param_groups[0]["lr"] = 0.0
    model[2].requires_grad_(True)
    with pytest.raises(ValueError, match="a second Hooking for the companion could not be built"):
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    assert len(optimizer.param_groups) == len(optimizer.companion_optimizer.param_groups) == 1
    assert optimizer.companion[2].weight is model[2].weight
