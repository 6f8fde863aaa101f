"""alpha shapes the companion's target and nothing else: what that means for each kind of optimizer."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer, distances
from dcl_optim.reference import dcl_step
from tests.helpers import assert_same, batches, mlp, train

SGD = partial(torch.optim.SGD, lr=0.1)
# An eps as large as the companion's gradients: alpha counts, and to slow the step as well would count it twice.
LARGE_EPS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
}
NO_EPS = {
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-30),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-30),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, eps=1e-30, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-30),
}


def trained(make, alpha, steps, **options):
    """A companion that starts apart from the model, after a few steps. Without a penalty both runs' models agree."""
    model, companion = mlp(seed=3), mlp(seed=4)
    optimizer = DCLOptimizer(make(model.parameters()), model, alpha=alpha, weight=0.0, companion=companion, **options)
    train(model, optimizer, batches(steps))
    return companion


def flat(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def first_step(make, alpha, **options):
    return flat(trained(make, alpha, 1, **options)) - flat(mlp(seed=4))


def gradient_of_the_distance():
    """The companion's first gradient for alpha = 0."""
    model, companion = mlp(seed=3), mlp(seed=4)
    (x, _), *_ = batches(1)
    F.mse_loss(companion(x), model(x).detach()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in companion.parameters()])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_under_sgd_alpha_scales_the_companions_step_by_one_minus_alpha(alpha):
    expected = -0.1 * (1 - alpha) * gradient_of_the_distance()
    torch.testing.assert_close(first_step(SGD, alpha), expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_with_a_large_eps_alpha_acts_in_the_gradient_only(alpha):
    """The first step written out: lr g / (|g| + eps) and lr g / (|g| / 10 + eps), lr being the base's."""
    g = (1 - alpha) * gradient_of_the_distance()
    decay = 1e-2 * flat(mlp(seed=4))
    expected = {"adamw": -0.01 * (g / (g.abs() + 1e-3) + decay), "rmsprop": -0.01 * g / (0.1 * g.abs() + 1e-3)}
    for name, make in LARGE_EPS.items():
        torch.testing.assert_close(first_step(make, alpha), expected[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", LARGE_EPS)
@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_with_a_large_eps_the_run_is_the_references(name, alpha):
    make, model = LARGE_EPS[name], mlp()
    hand, companion = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = DCLOptimizer(make(model.parameters()), model, alpha=alpha, weight=0.7)
    train(model, optimizer, batches(20))
    base, second = make(hand.parameters()), make(companion.parameters())
    for x, y in batches(20):
        dcl_step(hand, companion, base, second, x, y, F.cross_entropy, distances.mse, weight=0.7, alpha=alpha)
    assert_same(model, hand, rtol=1e-9, atol=1e-12)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NO_EPS)
def test_without_eps_a_constant_alpha_has_no_effect(name):
    low, high = (trained(NO_EPS[name], alpha, 20) for alpha in (0.1, 0.9))
    assert (flat(low) - flat(mlp(seed=4))).abs().max() > 0.05
    assert_same(low, high, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [SGD, NO_EPS["adam"]])
def test_the_companions_pace_is_companion_lr_scale_under_any_optimizer(make):
    full, quarter = first_step(make, 0.5), first_step(make, 0.5, companion_lr_scale=0.25)
    assert full.abs().max() > 1e-3
    torch.testing.assert_close(quarter, 0.25 * full, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("make", [SGD, *NO_EPS.values()])
def test_alpha_leaves_the_learning_rates_alone(make):
    model, seen = mlp(), []
    optimizer = DCLOptimizer(make(model.parameters()), model, alpha=0.75, weight=1.0, companion_lr_scale=2.0)
    optimizer.companion_optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["lr"]))
    train(model, optimizer, batches(2))
    assert seen == [2 * optimizer.param_groups[0]["lr"]] * 2


def test_a_schedule_is_followed():
    """Alpha 1 but for the third step: a companion without momentum moves there only."""
    model = mlp()
    optimizer = DCLOptimizer(SGD(model.parameters()), model, alpha=lambda step: 0.5 if step == 3 else 1.0, weight=1.0)
    moved = []
    for x, y in batches(5):
        before = flat(optimizer.companion)
        train(model, optimizer, [(x, y)])
        moved.append(not torch.equal(before, flat(optimizer.companion)))
    assert moved == [False, False, True, False, False]


def test_under_adam_with_alpha_one_a_copy_that_has_not_moved_rests():
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, alpha=1.0, weight=1.0)
    train(model, optimizer, batches(5))
    assert_same(optimizer.companion, mlp())
