"""What each forward counts for in the companion's step, also where the loss's factors are 0 or negative."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from dcl_optim.companion.weighting import WeightedMean
from dcl_optim.distances import companion_target, mse, value_and_gradient
from tests.helpers import assert_same, batches, mlp, sgd, unreadable_device, wrap

ONE, TWO = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 8.0]])


def as_tensors(*factors):
    return [torch.tensor(factor) for factor in factors]


@pytest.mark.parametrize("kind", [list, lambda factors: as_tensors(*factors)], ids=["numbers", "tensors"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((8.0,), ONE),
        ((1.0, -1.0), (ONE + TWO) / 2),
        ((-3.0, 1.0), (3 * ONE + TWO) / 4),
        ((0.0, 5.0), TWO),
        ((5.0, 0.0), ONE),
        ((0.0, 0.0), 0 * ONE),
        ((0.0,), 0 * ONE),
    ],
)
def test_mean_of_gradients(factors, expected, half, kind):
    mean, summed = WeightedMean(), torch.zeros(1, 2)
    for gradient, factor in zip((ONE, TWO), kind(factors), strict=False):
        summed += mean.weigh(gradient.clone(), factor, half)
    mean.divide([summed])
    assert_same(summed, expected, rtol=1e-6)


def test_a_single_gradient_is_left_as_it_is():
    mean, gradient = WeightedMean(), torch.rand(3, 4)
    before = gradient.clone()
    assert mean.weigh(gradient, 0.3, False) is gradient
    assert_same(gradient, before)


def test_the_mean_over_a_float32_and_a_float16_forward():
    mean, summed = WeightedMean(), torch.zeros(2, 1)
    summed += mean.weigh(torch.full((2, 1), 1e-3), 1.0, half=False)
    summed += mean.weigh(torch.full((2, 1), 3e-3), 1.0, half=True)
    mean.divide([summed])
    assert_same(summed, torch.full((2, 1), 2e-3), rtol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_a_gradient_without_rows_weighs_nothing(half):
    mean = WeightedMean()
    mean.weigh(torch.empty(0, 1), 8.0, half)
    gradient = mean.weigh(torch.full((2, 1), 3.0), 2.0, half)
    mean.divide([gradient])
    assert_same(gradient, torch.full((2, 1), 3.0))
    assert mean.count == 2


@pytest.mark.parametrize("half", [False, True])
def test_no_device_is_looked_at(half):
    with unreadable_device():
        mean = WeightedMean()
        for _ in range(2):
            gradient = mean.weigh(torch.ones(2, 3), torch.ones(()), half)
        mean.divide([gradient])


@pytest.mark.parametrize("half", [False, True])
def test_factors_on_the_models_device_reach_a_companion_elsewhere(half):
    with FakeTensorMode():
        mean = WeightedMean()
        for _ in range(2):
            gradient = mean.weigh(torch.ones(2, 3), torch.ones((), device="cuda"), half)
        mean.divide([gradient])
    assert gradient.device == torch.device("cpu")


def told(model, **options):
    """An optimizer that is told each loss's factor."""
    optimizer = wrap(model, loss_scale=lambda: optimizer.factor, **options)
    return optimizer


def step(optimizer, factors, data):
    """One step of several micro-batches, each loss with its factor."""
    optimizer.zero_grad()
    for factor, (x, y) in zip(factors, data, strict=True):
        optimizer.factor = factor
        (factor * F.cross_entropy(optimizer.model(x), y)).backward()
    optimizer.step()


@pytest.mark.parametrize("factors", [(1.0, -1.0), (0.0, 1.0), (1.0, 0.0), (-2.0, 1.0)])
def test_companion_equals_the_loop_by_hand(factors):
    model = mlp()
    optimizer = told(model, weight=0.0, alpha=0.4)
    companion = copy.deepcopy(model)
    theirs, total = sgd(companion), sum(map(abs, factors))
    data = list(batches(8))
    for pair in zip(data[::2], data[1::2], strict=True):
        theirs.zero_grad()
        for factor, (x, _) in zip(factors, pair, strict=True):
            z, c = model(x).detach(), companion(x)
            _, gradient = value_and_gradient(mse, c, companion_target(z, c, 0.4))
            c.backward(gradient * (abs(factor) / total))
        theirs.step()
        step(optimizer, factors, pair)
        assert_same(optimizer.companion, companion, rtol=1e-10, atol=1e-12)


def test_a_batch_that_counts_for_nothing_teaches_nothing():
    """The companion's optimizer steps as the model's does, with a gradient of zero: momentum goes on."""
    optimizer = told(mlp(), alpha=0.4)
    theirs = []
    optimizer.companion_optimizer.register_step_pre_hook(
        lambda own, *_: theirs.append([p.grad.clone() for group in own.param_groups for p in group["params"]])
    )
    for factor, batch in zip((1.0, 1.0, 0.0), batches(3), strict=True):
        step(optimizer, [factor], [batch])
    assert any(gradient.any() for gradient in theirs[1])
    assert len(theirs[2]) == len(theirs[1])
    assert not any(gradient.any() for gradient in theirs[2])


def test_unlearning_leaves_numbers_numbers():
    model = mlp()
    optimizer = told(model)
    for batch, forgotten in zip(batches(4), batches(4, seed=7), strict=True):
        step(optimizer, (1.0, -1.0), (batch, forgotten))
    x, y = batch
    for network in (model, optimizer.companion):
        assert F.cross_entropy(network(x), y).isfinite()
