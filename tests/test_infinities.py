"""Logits of minus infinity, as of masked classes and padded vocabularies: they take no part in any distance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer, functional, infinities
from dcl_optim.functional import chase_target, resolve_distance, value_and_gradient
from tests.helpers import CLASSES, FEATURES, assert_same, batches, sgd, unreadable_device

INF = float("inf")
NAMES = [*functional.DISTANCES, "mse sum_classes", "l1 sum_classes"]


def widened(tensor, value=-INF):
    """With a masked class at the front and one at the end."""
    return F.pad(tensor, (1, 1), value=value)


@pytest.mark.parametrize("name", NAMES)
def test_distance_of_masked_logits_is_that_of_the_others(name):
    torch.manual_seed(0)
    z, c = torch.randn(2, 6, 4, dtype=torch.float64)
    distance = resolve_distance(*name.split())
    value, gradient = value_and_gradient(distance, widened(z), widened(c))
    expected, slope = value_and_gradient(distance, z, c)
    share = 4 / 6 if name in ("mse", "l1") else 1  # their mean is over all classes
    assert_same((value, gradient), (expected * share, widened(slope, 0.0) * share), rtol=1e-12, atol=1e-14)
    assert_same(distance(widened(z), widened(c)), value, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_is_not_hidden(name):
    z = torch.randn(3, 4)
    broken = z.clone()
    broken[1, 2] = float("nan")
    for pair in ((z, broken), (broken, z)):
        assert value_and_gradient(resolve_distance(*name.split()), *pair)[0].isnan()


@pytest.mark.parametrize("alpha", [0.3, 0.6, 1.0])
def test_target_of_masked_logits_is_masked(alpha):
    z, c = torch.randn(2, 6, 4)
    assert_same(chase_target(widened(z), widened(c), alpha), widened(chase_target(z, c, alpha)))
    assert_same(chase_target(widened(z).half(), widened(c).half(), alpha)[:, 0], torch.full((6,), -INF))


@pytest.mark.parametrize("name", functional.DISTANCES)
def test_where_a_device_is_not_looked_at(name):
    """The same operations on the CPU, told that it is none."""
    z, c = widened(torch.randn(6, 4)), widened(torch.randn(6, 4))
    distance = resolve_distance(name)
    expected = value_and_gradient(distance, z, c), chase_target(z, c, 0.6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infinities, "_may_look", lambda tensor: False)
        assert_same((value_and_gradient(distance, z, c), chase_target(z, c, 0.6)), expected)
    with unreadable_device():
        value_and_gradient(distance, torch.zeros(2, 3), chase_target(torch.zeros(2, 3), torch.zeros(2, 3), 0.6))


class Masked(nn.Module):
    """Its last two classes are masked, as a vocabulary is padded, or left out altogether."""

    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES + 2)).double()
        self.masked = masked

    def forward(self, x):
        z = self.net(x)
        return torch.cat([z[:, :CLASSES], z[:, CLASSES:] - INF], 1) if self.masked else z[:, :CLASSES]


def train(model, optimizer):
    for x, y in batches(12):
        optimizer.zero_grad()
        if isinstance(optimizer, DCPOptimizer):
            optimizer.set_targets(y)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("name", functional.DISTANCES)
def test_companion_of_a_masked_model_equals_that_of_its_other_classes(name):
    """Where the mean is over all classes, the weight makes up for it, and so does the companion's learning rate."""
    found = []
    share = CLASSES / (CLASSES + 2) if name in ("mse", "l1") else 1.0
    for masked, weight, lr_scale in ((0, 0.5 * share, share), (2, 0.5, 1.0)):
        model = Masked(masked)
        optimizer = DCLOptimizer(
            sgd(model), model, weight=weight, alpha=0.4, distance=name, companion_lr_scale=lr_scale
        )
        train(model, optimizer)
        found.append((model.net.state_dict(), optimizer.companion.net.state_dict()))
    assert_same(*found, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", functional.DISTANCES)
def test_prototypes_of_a_masked_model_equal_those_of_its_other_classes(name):
    found = []
    share = CLASSES / (CLASSES + 2) if name in ("mse", "l1") else 1.0
    for masked, weight in ((0, 0.5 * share), (2, 0.5)):
        model = Masked(masked)
        optimizer = DCPOptimizer(sgd(model), model, CLASSES + masked, weight=weight, alpha=0.4, distance=name)
        train(model, optimizer)
        prototypes = optimizer.prototypes[:CLASSES]
        assert (prototypes[:, CLASSES:] == -INF).all()
        found.append((model.net.state_dict(), prototypes[:, :CLASSES]))
    assert_same(*found, rtol=1e-7, atol=1e-9)
