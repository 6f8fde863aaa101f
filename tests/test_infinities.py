"""Logits of minus infinity, as of masked classes and padded vocabularies: they take no part in any distance."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from dcl_optim.distances import companion_target, resolve_distance, value_and_gradient
from tests.helpers import CLASSES, FEATURES, assert_same, batches, sgd

INF = float("inf")
LOG_3 = math.log(3.0)
SIDE = 0.5 / (1.0 + math.e)  # of two rows that point at their own forecasts, what the other one's pulls at each

# By hand: name, options, z, c, the value, and its gradient with respect to z.
MASKED_IN_BOTH = [
    ("mse", {}, [[1, -INF, 3]], [[0, -INF, 1]], 5 / 3, [[2 / 3, 0, 4 / 3]]),
    ("l1", {}, [[1, -INF, 3]], [[0, -INF, 4]], 2 / 3, [[1 / 3, 0, -1 / 3]]),
    ("kl", {"temperature": 1}, [[0, -INF, LOG_3]], [[0, -INF, 0]], 0.5 * math.log(4 / 3), [[-0.25, 0, 0.25]]),
    ("kl", {"temperature": 2}, [[0, -INF, 2 * LOG_3]], [[0, -INF, 0]], 0.5 * math.log(4 / 3), [[-0.125, 0, 0.125]]),
    (
        "infonce",
        {"temperature": 1},
        [[1, -INF, 0], [0, -INF, 1]],
        [[1, -INF, 0], [0, -INF, 1]],
        math.log(1 + 1 / math.e),
        [[0, 0, SIDE], [SIDE, 0, 0]],
    ),
]


@pytest.mark.parametrize("by", ["value_and_gradient", "autograd"])
@pytest.mark.parametrize(("name", "options", "z", "c", "value", "gradient"), MASKED_IN_BOTH)
def test_a_class_that_is_masked_in_both(name, options, z, c, value, gradient, by):
    z, c, gradient = (torch.tensor(rows, dtype=torch.float64) for rows in (z, c, gradient))
    distance = resolve_distance(name, **options)
    if by == "autograd":
        leaf = z.requires_grad_()
        found = distance(leaf, c)
        found.backward()
        slope = leaf.grad
    else:
        found, slope = value_and_gradient(distance, z, c)
    assert found.item() == pytest.approx(value, rel=1e-12)
    assert_same(slope, gradient, rtol=1e-12, atol=1e-15)


def test_a_class_that_the_forecast_alone_rules_out_is_pushed_down_by_kl():
    """It has no share in the value, and its gradient is the model's probability."""
    z, c = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[0.0, -INF, 0.0]], dtype=torch.float64)
    value, gradient = value_and_gradient(resolve_distance("kl", temperature=1.0), z, c)
    assert value.item() == pytest.approx(math.log(1.5))
    assert_same(gradient, torch.tensor([[-1 / 6, 1 / 3, -1 / 6]], dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("name", ["mse", "l1", "kl"])
def test_a_class_that_the_model_alone_masks_is_infinitely_far(name):
    z, c = torch.tensor([[0.0, -INF, 0.0]]), torch.zeros(1, 3)
    assert value_and_gradient(resolve_distance(name), z, c)[0] == INF


@pytest.mark.parametrize("name", distances.DISTANCES)
def test_what_is_no_number_is_not_hidden(name):
    z = torch.randn(3, 4)
    broken = z.clone()
    broken[1, 2] = float("nan")
    for pair in ((z, broken), (broken, z)):
        assert value_and_gradient(resolve_distance(name), *pair)[0].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_target_of_masked_logits_is_masked(dtype):
    z, c = torch.tensor([[8.0, -INF]], dtype=dtype), torch.tensor([[0.0, -INF]], dtype=dtype)
    for alpha, expected in ((0.0, 8.0), (0.75, 2.0), (1.0, 0.0)):
        assert companion_target(z, c, alpha).tolist() == [[expected, -INF]]


def test_the_target_is_exactly_the_forecast_where_the_model_agrees():
    """At the first step of a copy the companion's gradient is zero, and no rounding of it."""
    torch.manual_seed(0)
    z: Tensor = torch.randn(100, 7, dtype=torch.float64)
    for alpha in torch.rand(20).tolist():
        assert torch.equal(companion_target(z, z.clone(), alpha), z)


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


@pytest.mark.parametrize("name", distances.DISTANCES)
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


@pytest.mark.parametrize("name", distances.DISTANCES)
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
