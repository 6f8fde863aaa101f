"""Scripts that look at gradients with ``torch.autograd.grad`` before the backward train as those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, dropout_net, mlp, sgd

WRAPPERS: dict[str, Callable[..., Any]] = {
    "dcl": lambda model, criterion: DCLOptimizer(sgd(model), model, weight=2.0),
    "dcl criterion": lambda model, criterion: DCLOptimizer(sgd(model), model, weight=2.0, criterion=criterion),
    "dcl kl": lambda model, criterion: DCLOptimizer(sgd(model), model, weight=2.0, distance="kl"),
    "dcl beside": lambda model, criterion: DCLOptimizer(sgd(model), model, weight=2.0, overlap=True),
    "dcp": lambda model, criterion: DCPOptimizer(sgd(model), model, CLASSES, weight=2.0, criterion=criterion),
    "plain": lambda model, criterion: sgd(model),
}


def looks_at_nothing(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    pass


def looks_at_the_head(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    torch.autograd.grad(loss, model[-1].weight, retain_graph=True)


def looks_at_logits(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    torch.autograd.grad(7 * loss, z, retain_graph=True)


def looks_twice(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    looks_at_logits(loss, z, model, optimizer)
    looks_at_the_head(loss, z, model, optimizer)


def clears_after_looking(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    looks_at_the_head(loss, z, model, optimizer)
    optimizer.zero_grad()


def trained(wrapper: str, look: Callable[..., None], build: Callable[[], nn.Sequential]) -> tuple[nn.Module, Any]:
    model, criterion = build(), nn.CrossEntropyLoss()
    optimizer = WRAPPERS[wrapper](model, criterion)
    for x, y in batches(6):
        optimizer.zero_grad()
        z = model(x)
        loss = 3 * criterion(z, y)
        look(loss, z, model, optimizer)
        loss.backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("look", [looks_at_the_head, looks_at_logits, looks_twice, clears_after_looking])
@pytest.mark.parametrize(
    ("build", "wrapper"),
    [*((mlp, wrapper) for wrapper in WRAPPERS), *((dropout_net, w) for w in WRAPPERS if w != "dcl beside")],
)
def test_a_look_changes_nothing(build, wrapper, look):
    model, optimizer = trained(wrapper, looks_at_nothing, build)
    other, looking = trained(wrapper, look, build)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(looking.state_dict(), optimizer.state_dict())
    if wrapper != "plain":
        assert looking.logs() == optimizer.logs()
        assert looking.penalty > 0


@pytest.mark.parametrize("wrapper", ["dcl", "dcl criterion", "dcp"])
def test_gradients_that_the_script_puts_in_place_itself(wrapper):
    """As gradient surgery does: no backward comes, and the one whose graph was kept has brought the penalty."""

    def grad(loss: Tensor, model: nn.Module) -> None:
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()], retain_graph=True), strict=True
        ):
            parameter.grad = gradient

    runs = []
    for backward in (lambda loss, model: loss.backward(), grad):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = WRAPPERS[wrapper](model, criterion)
        for x, y in batches(6):
            optimizer.zero_grad()
            backward(criterion(model(x), y), model)
            optimizer.step()
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_same(runs[0], runs[1])


@pytest.mark.parametrize("inputs", [False, True])
def test_of_two_backwards_that_keep_their_gradients_one_brings_the_penalty(inputs):
    """The second is a look no more than the first: the penalty is added once, with the first one's factor."""
    gradients = []
    for parts in ((1.0,), (0.25, 0.75)):
        model = mlp()
        DCLOptimizer(sgd(model), model, weight=2.0, loss_scale=1.0, companion=lambda: mlp(seed=1))
        x, y = next(iter(batches(1)))
        z = model(x)
        for part in parts:
            wanted = {"inputs": [*model.parameters()]} if inputs else {}
            (part * F.cross_entropy(z, y)).backward(retain_graph=True, **wanted)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
