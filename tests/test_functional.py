"""Distances, chase target and prototype update against values worked out by hand, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcl_optim import distances
from dcl_optim.forecaster import ForwardRecord
from tests.helpers import assert_same

Z = torch.tensor([[1.0, 3.0], [0.0, -2.0]], dtype=torch.float64)
C = torch.tensor([[0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)


def test_mse_and_l1_by_hand():
    assert distances.mse(Z, C).item() == (1 + 4 + 0 + 16) / 4
    assert distances.mse(Z, C, "sum_classes").item() == (1 + 4 + 0 + 16) / 2
    assert distances.l1(Z, C).item() == (1 + 2 + 0 + 4) / 4
    assert distances.l1(Z, C, "sum_classes").item() == (1 + 2 + 0 + 4) / 2


def test_kl_by_hand():
    """One row, T = 2: KL of (1/2, 1/2) against softmax(0, ln 9 / 2) = (1/4, 3/4)."""
    z, c = torch.tensor([[0.0, 2 * math.log(3)]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert distances.kl(z, c, temperature=2.0).item() == pytest.approx(expected, abs=1e-12)


def test_infonce_by_hand():
    """Rows along the axes; the second forecast points the wrong way. Cosines (1, 0) and (0, -1), T = 1/2."""
    z = torch.tensor([[3.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    c = torch.tensor([[1.0, 0.0], [0.0, -2.0]], dtype=torch.float64)
    first = -math.log(math.exp(2) / (math.exp(2) + 1))
    second = -math.log(math.exp(-2) / (1 + math.exp(-2)))
    assert distances.infonce(z, c, temperature=0.5).item() == pytest.approx((first + second) / 2, abs=1e-12)


@pytest.mark.parametrize("name", [*distances.DISTANCES, "mse sum_classes"])
def test_defaults_and_gradient(name):
    distance = distances.resolve_distance(*name.split())
    value, gradient = distances.value_and_gradient(distance, Z, C)
    assert_same(value, distance(Z, C), atol=1e-14)
    leaf = Z.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: distance(z, C), (leaf + 0.01,))
    distance(leaf, C).backward()
    assert_same(gradient, leaf.grad, atol=1e-14)
    assert not gradient.requires_grad


def test_half_precision_is_lifted():
    value, gradient = distances.value_and_gradient(distances.mse, Z.half() * 1e-4, C.half() * 0)
    assert value.dtype == gradient.dtype == torch.float32
    assert gradient.abs().min() == 0
    assert gradient[0, 0].item() == pytest.approx(2e-4 / 4, rel=1e-2)


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(0, 1), seed=st.integers(0, 1000))
def test_chase_gradient_of_mse_is_one_minus_alpha_times_the_pull(alpha, seed):
    """With mse, alpha only scales the companion's gradient: (1 - alpha) times that of Delta(c, z)."""
    generator = torch.Generator().manual_seed(seed)
    z, c = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    _, chase = distances.value_and_gradient(distances.mse, c, distances.companion_target(z, c, alpha))
    _, pull = distances.value_and_gradient(distances.mse, c, z)
    torch.testing.assert_close(chase, (1 - alpha) * pull, rtol=1e-9, atol=1e-12)


def test_class_totals_against_a_loop():
    torch.manual_seed(0)
    rows, classes = torch.randn(40, 6, dtype=torch.float64), torch.randint(8, (40,))  # 7 stands for "no class"
    counts = torch.rand(40, dtype=torch.float64)
    totals = distances.class_totals(rows, classes, counts, 7)
    assert totals.shape == (7, 7)
    for k in range(7):
        assert_same(totals[k, :-1], rows[classes == k].sum(0), atol=1e-12)
        assert_same(totals[k, -1], counts[classes == k].sum(), atol=1e-12)


def test_departure_weights_by_hand():
    """Class 0 moves by a quarter of its mean, class 1 is absent, class 2 takes its mean whole, class 3 has nothing."""
    counts, seen = torch.tensor([2.0, 0.0, 4.0, 0.0]), torch.tensor([True, True, False, False])
    weights = distances.departure_weights(counts, seen, alpha=0.75)
    assert weights[[0, 2]].tolist() == [0.25 / 2, 1 / 4]
    assert weights.isfinite().all()


@pytest.mark.parametrize("reduction", distances.REDUCTIONS)
def test_squared_is_mse_of_a_difference(reduction):
    value, gradient = distances.squared(Z - C, len(Z), reduction)
    expected = distances.value_and_gradient(distances.resolve_distance("mse", reduction), Z, C)
    assert_same((value, gradient), expected)
    assert value == distances.mse(Z, C, reduction)
    halved = distances.squared(Z - C, torch.tensor(4.0, dtype=torch.float64), reduction)
    assert_same(halved, (value / 2, gradient / 2), atol=1e-15)


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_rows_and_back(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1)) if len(shape) > 1 else 1
    tensor = torch.randn(*shape)
    forward = ForwardRecord(tensor, dim)
    rows = forward.rows(tensor)
    assert rows.shape[1] == (tensor.shape[dim] if len(shape) > 1 else 1)
    assert torch.equal(forward.unrows(rows), tensor)


def test_forward_holds_a_copy():
    tensor = torch.zeros(2, 3)
    forward = ForwardRecord(tensor, 1)
    tensor += 1
    assert forward.logits.sum() == 0
    assert forward.produced(tensor)
    assert forward.produced(tensor.view(3, 2))
    assert not forward.produced(tensor.clone())
    assert not forward.produced(None)
