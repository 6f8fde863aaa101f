"""Distances and the companion's target against values worked out by hand, and their properties."""

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
    assert distances.l1(Z, C).item() == (1 + 2 + 0 + 4) / 4


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


def test_in_infonce_rows_of_z_look_for_rows_of_c():
    """Both forecasts are the same row: of the other direction each would be found with certainty, or not at all."""
    z = torch.tensor([[3.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    c = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    assert distances.infonce(z, c).item() == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize("name", distances.DISTANCES)
def test_defaults_and_gradient(name):
    distance = distances.resolve_distance(name)
    value, gradient = distances.value_and_gradient(distance, Z, C)
    assert_same(value, distance(Z, C), atol=1e-14)
    leaf = Z.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: distance(z, C), (leaf + 0.01,))
    distance(leaf, C).backward()
    assert_same(gradient, leaf.grad, atol=1e-14)
    assert not gradient.requires_grad


@pytest.mark.parametrize("distance", [distances.mse, lambda z, c: distances.mse(z, c)], ids=["directly", "autograd"])
def test_half_precision_is_lifted(distance):
    value, gradient = distances.value_and_gradient(distance, Z.half() * 1e-4, C.half() * 0)
    assert value.dtype == gradient.dtype == torch.float32
    assert gradient.abs().min() == 0
    assert gradient[0, 0].item() == pytest.approx(2e-4 / 4, rel=1e-2)


@settings(max_examples=50)
@given(alpha=st.floats(0, 1), seed=st.integers(0, 1000))
def test_the_companions_gradient_of_mse_is_one_minus_alpha_times_the_pull(alpha, seed):
    """With mse, alpha only scales the companion's gradient: (1 - alpha) times that of Delta(c, z)."""
    generator = torch.Generator().manual_seed(seed)
    z, c = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    gradient = distances.companion_gradient(distances.mse, z, c, alpha)
    _, pull = distances.value_and_gradient(distances.mse, c, z)
    torch.testing.assert_close(gradient, (1 - alpha) * pull, rtol=1e-9, atol=1e-12)


def test_what_is_computed_directly_for_mse_is_autograds():
    """The shortcuts are taken for mse itself; a function that calls it goes through autograd."""
    assert_same(
        distances.value_and_gradient(distances.mse, Z, C),
        distances.value_and_gradient(lambda z, c: distances.mse(z, c), Z, C),
        atol=1e-14,
    )
    assert_same(
        distances.companion_gradient(distances.mse, Z, C, 0.6),
        distances.companion_gradient(lambda z, c: distances.mse(z, c), Z, C, 0.6),
        atol=1e-14,
    )


@pytest.mark.parametrize("name", distances.DISTANCES)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_companions_gradient_is_that_of_the_distance_to_its_target(name, alpha):
    distance, leaf = distances.resolve_distance(name), C.clone().requires_grad_()
    distance(leaf, alpha * C + (1 - alpha) * Z).backward()
    gradient = distances.companion_gradient(distance, Z, C.clone().requires_grad_(), alpha)
    assert_same(gradient, leaf.grad, atol=1e-14)
    assert not gradient.requires_grad


def test_squared_by_hand():
    value, gradient = distances.squared(Z - C, 4)
    assert value == (1 + 4 + 0 + 16) / 4
    assert_same(gradient, (Z - C) / 2)
    halved = distances.squared(Z - C, torch.tensor(8.0, dtype=torch.float64))
    assert_same(halved, (value / 2, gradient / 2), atol=1e-15)


def test_equal_infinities_are_no_difference():
    z = torch.tensor([[1.0, -math.inf, math.inf, 2.0]], dtype=torch.float64)
    c = torch.tensor([[0.5, -math.inf, math.inf, 2.0]], dtype=torch.float64)
    assert distances.difference(z, c).tolist() == [[0.5, 0.0, 0.0, 0.0]]
    assert distances.difference(z, -c)[0, 1:3].tolist() == [-math.inf, math.inf]
    for name in ("mse", "l1"):
        value, gradient = distances.value_and_gradient(distances.resolve_distance(name), z, c)
        assert value == {"mse": 0.25, "l1": 0.5}[name] / 4
        assert gradient.tolist() == [[0.25, 0.0, 0.0, 0.0]]


@settings(max_examples=50)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_rows_and_back(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1)) if len(shape) > 1 else 1
    tensor = torch.randn(*shape)
    record = ForwardRecord(tensor, dim)
    rows = record.rows(tensor)
    assert rows.shape[1] == (tensor.shape[dim] if len(shape) > 1 else 1)
    assert torch.equal(record.unrows(rows), tensor)


def test_a_record_holds_a_copy():
    tensor = torch.zeros(2, 3)
    record = ForwardRecord(tensor, 1)
    tensor += 1
    assert record.logits.sum() == 0
    assert record.produced(tensor)
    assert record.produced(tensor.view(3, 2))
    assert not record.produced(tensor.clone())
    assert not record.produced(None)
