"""SAM and its kin, which evaluate the model twice a step: both gradients are regularised, the companion learns once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim._rng import capture, replayed
from dcl_optim.distances import mse
from dcl_optim.reference import dcp_step
from tests.helpers import CLASSES, MODELS, assert_same, batches, cells, mlp

WEIGHT, ALPHA = 0.4, 0.6
Network = nn.Module


def sam(model: Network) -> Any:
    return pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9, weight_decay=1e-3)


def inner(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=1e-3)


# ---- three ways to write SAM's loop ----------------------------------------------------------------------------------


def with_the_closure_called_before(model: Network, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


def with_a_backward_before(model: Network, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    F.cross_entropy(model(x), y).backward()
    optimizer.step(closure)
    optimizer.zero_grad()


def with_a_closure_that_leaves_the_backward_to_us(model: Network, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step(lambda: F.cross_entropy(model(x), y))


LOOPS = (with_the_closure_called_before, with_a_backward_before, with_a_closure_that_leaves_the_backward_to_us)


class ByHand:
    """SAM and Deep Companion Learning written out: perturb, evaluate again, step; the companion learns from θ_t."""

    def __init__(self, model: Network) -> None:
        self.model, self.companion = model, copy.deepcopy(model)
        self.base, self.second = sam(model), inner(self.companion.parameters())

    def evaluate(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state = capture(torch.device("cpu"))
        z = self.model(x)
        with replayed(state):
            c = self.companion(x)
        (F.cross_entropy(z, y) + WEIGHT * mse(z, c.detach())).backward()
        return z.detach(), c

    def step(self, x: Tensor, y: Tensor) -> None:
        self.base.zero_grad()
        z, c = self.evaluate(x, y)
        self.second.zero_grad()
        mse(c, c.detach() + (1 - ALPHA) * (z - c.detach())).backward()
        self.base.first_step(zero_grad=True)
        self.evaluate(x, y)
        self.base.second_step()
        self.second.step()


@pytest.mark.parametrize(
    ("kind", "loop"), cells(product(MODELS, LOOPS), *zip(MODELS, LOOPS, strict=True), ("dropout", LOOPS[0]))
)
def test_sam_is_sam_with_the_penalty_in_both_gradients(kind: str, loop: Callable[..., None]) -> None:
    hand, model = ByHand(MODELS[kind]()), MODELS[kind]()
    optimizer = DCLOptimizer(sam(model), model, weight=WEIGHT, alpha=ALPHA)
    schedulers = [StepLR(each, 3, gamma=0.3) for each in (hand.base.base_optimizer, hand.second, optimizer)]
    torch.manual_seed(3)
    for x, y in batches(7):
        hand.step(x, y)
        schedulers[0].step()
        schedulers[1].step()
    torch.manual_seed(3)
    for x, y in batches(7):
        loop(model, optimizer, x, y)
        schedulers[2].step()
    assert_same(hand.model, model, atol=1e-12)
    assert_same(hand.companion, optimizer.companion, atol=1e-12)
    assert type(optimizer.companion_optimizer) is torch.optim.SGD
    assert optimizer.logs()["step"] == 7


def test_prototypes_learn_once_a_step_from_the_unperturbed_model() -> None:
    hand, model = mlp(), mlp()
    criterion = nn.CrossEntropyLoss()
    optimizer = DCPOptimizer(sam(model), model, CLASSES, weight=0.0, alpha=0.6, update="batch")
    base, still = sam(hand), torch.optim.SGD(hand.parameters(), lr=0.0)
    prototypes: dict[int, Tensor] = {}
    for x, y in batches(5):
        dcp_step(hand, prototypes, still, x, y, F.cross_entropy, mse, weight=0.0)
        with_the_closure_called_before(hand, base, x, y)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    assert_same(hand, model)
    for label, prototype in prototypes.items():
        assert_same(optimizer.prototypes[label], prototype, atol=1e-12)


@pytest.mark.parametrize("loop", LOOPS)
def test_prototypes_read_their_labels_in_both_of_sams_evaluations(loop: Callable[..., None]) -> None:
    """Equal to a training in which labels and classes are given."""
    trained: list[tuple[Network, DCPOptimizer]] = []
    current: list[Tensor] = []
    for labels in ({}, {"num_classes": CLASSES, "targets": lambda *_: current[0]}):
        model = mlp()
        optimizer = DCPOptimizer(sam(model), model, weight=1.0, alpha=0.6, **labels)
        for x, y in batches(5):
            current[:] = [y]
            loop(model, optimizer, x, y)
        trained.append((model, optimizer))
    (model, optimizer), (expected, second) = trained
    assert_same(model, expected)
    assert_same(optimizer.prototypes, second.prototypes)
    assert optimizer.penalty > 0


@pytest.mark.parametrize("with_closure", [True, False])
def test_sam_without_a_closure_says_so_and_its_own_two_steps_point_to_step(with_closure: bool) -> None:
    model = mlp()
    optimizer: Any = DCLOptimizer(sam(model), model, weight=1.0)
    x, y = next(batches(1))
    F.cross_entropy(model(x), y).backward()
    if with_closure:
        for name in ("first_step", "second_step"):
            with pytest.raises(AttributeError, match=rf"{name}.*step\(\)"):
                getattr(optimizer, name)()
    else:
        with pytest.raises(pytorch_optimizer.base.exception.NoClosureError):
            optimizer.step()


# ---- the kin: θ as alone, ω from θ_t ---------------------------------------------------------------------------------


def kin(name: str, model: Network) -> Any:
    if name == "WSAM":
        return pytorch_optimizer.WSAM(model, model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1)
    if name == "GSAM":
        rho = pytorch_optimizer.lr_scheduler.ProportionScheduler
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        rho_scheduler = rho(StepLR(sgd, 100), max_lr=0.1, min_lr=0.0, max_value=0.1, min_value=0.01)
        return pytorch_optimizer.GSAM(model.parameters(), sgd, model, rho_scheduler)
    if name == "BSAM":
        return pytorch_optimizer.BSAM(model.parameters(), num_data=80, lr=0.1)
    return getattr(pytorch_optimizer, name)(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1)


def step_as_its_docs_say(name: str, model: Network, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if name == "GSAM":
        getattr(optimizer, "base", optimizer).set_closure(nn.CrossEntropyLoss(), x, y)
        optimizer.zero_grad()  # it clears them itself, but later: they would be gradients that no forward led to
        optimizer.step()
        return
    if name != "WSAM":
        closure()
    optimizer.step(closure)


@pytest.mark.parametrize("name", ["SAM", "WSAM", "LookSAM", "FriendlySAM", "GSAM"])
def test_the_kin_trains_as_alone_and_the_companion_learns_from_the_unperturbed_model(name: str) -> None:
    plain, model = mlp(), mlp()
    companion = copy.deepcopy(plain)
    second = torch.optim.SGD(companion.parameters(), lr=0.1)
    base, optimizer = kin(name, plain), DCLOptimizer(kin(name, model), model, weight=0.0, alpha=ALPHA)
    torch.manual_seed(3)
    for x, y in batches(6):
        z, c = plain(x).detach(), companion(x)
        step_as_its_docs_say(name, plain, base, x, y)
        second.zero_grad()
        mse(c, c.detach() + (1 - ALPHA) * (z - c.detach())).backward()
        second.step()
    torch.manual_seed(3)
    for x, y in batches(6):
        step_as_its_docs_say(name, model, optimizer, x, y)
    assert_same(plain, model)
    assert_same(companion, optimizer.companion, atol=1e-12)


def test_bsam_cannot_train_the_companion_and_says_so() -> None:
    model = mlp()
    optimizer = DCLOptimizer(kin("BSAM", model), model, weight=1.0)
    with pytest.raises(Exception, match="the companion's optimizer: pass companion_optimizer="):
        step_as_its_docs_say("BSAM", model, optimizer, *next(batches(1)))


def test_bsam_trains_as_alone_beside_another_companion_optimizer() -> None:
    plain, model = mlp(), mlp()
    base = kin("BSAM", plain)
    second = functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = DCLOptimizer(kin("BSAM", model), model, weight=0.0, companion_optimizer=second)
    for trained, stepping in ((plain, base), (model, optimizer)):
        torch.manual_seed(3)  # it adds noise to the weights
        for x, y in batches(5):
            step_as_its_docs_say("BSAM", trained, stepping, x, y)
    assert_same(plain, model)
    assert not torch.equal(optimizer.companion[0].weight, mlp()[0].weight)


def test_a_refused_state_leaves_the_inner_optimizer_bound_to_the_outer_ones_groups() -> None:
    model = mlp()
    base = sam(model)
    optimizer = DCLOptimizer(base, model)
    assert optimizer.companion is not None  # before it is made there is nothing to save
    state = copy.deepcopy(optimizer.state_dict())
    state["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]["state"] = None
    before = base.param_groups, base.state, base.base_optimizer.param_groups, base.base_optimizer.state
    with pytest.raises(ValueError, match="nothing has changed"):
        optimizer.load_state_dict(state)
    after = base.param_groups, base.state, base.base_optimizer.param_groups, base.base_optimizer.state
    assert [*map(id, after)] == [*map(id, before)]
    assert base.base_optimizer.param_groups is base.param_groups
