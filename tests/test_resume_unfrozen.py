"""Resuming after layers were unfrozen: the companion's optimizer state belongs to its parameters by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import FEATURES, assert_same, batches, train

BEFORE, AFTER = list(batches(4)), list(batches(3, seed=2))


def square(frozen: bool) -> nn.Sequential:
    """Layers of one shape: their states could be exchanged without complaint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)).double()
    model[0].requires_grad_(not frozen)
    return model


def wrap(model: nn.Module, groups: int, **options: Any) -> DCLOptimizer:
    layers = model.parameters() if groups == 1 else [{"params": layer.parameters()} for layer in model]
    return DCLOptimizer(torch.optim.SGD(layers, lr=0.1, momentum=0.9), model, **{"weight": 1.0} | options)


def unfrozen_midway(groups: int, steps_after: int = 2) -> tuple[nn.Module, DCLOptimizer]:
    model = square(frozen=True)
    optimizer = wrap(model, groups)
    train(model, optimizer, BEFORE[:2])
    model[0].requires_grad_(True)
    train(model, optimizer, BEFORE[2 : 2 + steps_after])
    return model, optimizer


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("steps_after", [0, 2])
@pytest.mark.parametrize("order", ["wrapped unfrozen", "unfrozen after wrapping", "unfrozen after a step"])
def test_a_resumed_run_equals_the_uninterrupted_one(order: str, groups: int, steps_after: int) -> None:
    model, optimizer = unfrozen_midway(groups, steps_after)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    again = square(frozen=order != "wrapped unfrozen")
    other = wrap(again, groups)
    if order == "unfrozen after a step":
        train(again, other, AFTER[:1])
    again[0].requires_grad_(True)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])

    train(model, optimizer, AFTER)
    train(again, other, AFTER)
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)


def test_a_state_without_names_is_loaded_by_its_order() -> None:
    model = square(frozen=False)
    optimizer = wrap(model, 1)
    train(model, optimizer, BEFORE)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    (group,) = saved[1]["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]["param_groups"]
    assert group.pop("names_in_companion") == ["0.weight", "0.bias", "1.weight", "1.bias"]
    again = square(frozen=False)
    other = wrap(again, 1)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(model, optimizer, AFTER)
    train(again, other, AFTER)
    assert_same(other.companion, optimizer.companion)


def test_an_optimizer_with_parameters_that_the_companion_does_not_know_goes_by_order() -> None:
    def started() -> tuple[nn.Module, DCLOptimizer]:
        model, companion, other = square(frozen=False), square(frozen=False), nn.Linear(2, 2).double()
        own = torch.optim.SGD([*companion.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
        return model, wrap(model, 1, companion=companion, companion_optimizer=own)

    model, optimizer = started()
    train(model, optimizer, BEFORE)
    (group,) = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]["param_groups"]
    assert "names_in_companion" not in group
    again, resumed = started()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, AFTER)
    train(again, resumed, AFTER)
    assert_same(resumed.companion, optimizer.companion)


def test_parameters_in_other_groups_are_refused() -> None:
    model = square(frozen=False)
    optimizer = wrap(model, 2)
    crossed = [{"params": [layer.weight for layer in model]}, {"params": [layer.bias for layer in model]}]
    base = torch.optim.SGD(crossed, lr=0.1, momentum=0.9)
    before = repr(optimizer.state_dict())
    other = DCLOptimizer(base, model, weight=1.0).state_dict()
    with pytest.raises(ValueError, match=r"its parameters in groups of \[\['0.weight', '1.weight'\], .*not \[\['0.w"):
        optimizer.load_state_dict(other)
    assert repr(optimizer.state_dict()) == before
