"""A run that unfreezes layers in its middle is resumed bit for bit; what does not fit is refused with the fix."""

import copy

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import FEATURES, assert_same, assert_same_networks, batches, fit, train

BEFORE, AFTER = list(batches(4)), list(batches(3, seed=2))
COPIED_AGAIN = pytest.mark.filterwarnings("ignore:the base optimizer trains other parameters than before")


def square():
    """Layers of one shape, whose states could be exchanged without complaint; the first is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)).double()
    model[0].requires_grad_(False)
    return model


def wrap(model, groups=1, **options):
    layers = model.parameters() if groups == 1 else [{"params": layer.parameters()} for layer in model]
    return DCLOptimizer(
        torch.optim.SGD(layers, lr=0.1, momentum=0.9), model, **{"weight": 1.0, "companion_fraction": 1} | options
    )


def make(parameters):
    """A companion's optimizer of its own, which is built again with each copy."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def unfrozen_midway(groups, steps_after, **options):
    model = square()
    optimizer = wrap(model, groups, **options)
    fit(optimizer, BEFORE[:2])
    model[0].requires_grad_(True)
    fit(optimizer, BEFORE[2 : 2 + steps_after])
    return model, optimizer


@COPIED_AGAIN
@pytest.mark.parametrize(
    ("groups", "steps_after", "options"),
    [(1, 2, {}), (2, 2, {}), (2, 0, {}), (1, 2, {"companion_optimizer": make})],
)
def test_a_resumed_run_equals_the_uninterrupted_one(groups, steps_after, options):
    """Before the first forward pass after unfreezing, the companion is still that of the frozen model."""
    model, optimizer = unfrozen_midway(groups, steps_after, **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    again = square()
    other = wrap(again, groups, **options)
    again.load_state_dict(saved[0])
    if steps_after:
        again[0].requires_grad_(True)
        other.load_state_dict(saved[1])
    else:
        other.load_state_dict(saved[1])
        again[0].requires_grad_(True)

    train(model, optimizer, AFTER)
    fit(other, AFTER)
    assert_same_networks(other, optimizer)


@COPIED_AGAIN
@pytest.mark.parametrize("steps_after", [0, 2])
def test_a_state_that_was_saved_with_other_frozen_layers_is_refused_and_nothing_changes(steps_after):
    _, optimizer = unfrozen_midway(1, steps_after)
    again = square()
    again[0].requires_grad_(not steps_after)
    other = wrap(again)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="the state of the companion does not fit: missing"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(other.state_dict(), before)
