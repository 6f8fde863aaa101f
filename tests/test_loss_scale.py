"""What the loss was multiplied by: recovered exactly where it is accepted, refused where it cannot be known."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.hooks.cross_entropy import read_cross_entropy
from dcl_optim.hooks.loss_scale import LossScale
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd


def recover(loss_of, rows=32, classes=10, spread=2.0, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    z = (torch.randn(rows, classes, dtype=torch.float64) * spread).to(dtype).requires_grad_()
    y = torch.randint(classes, (rows,))
    (gradient,) = torch.autograd.grad(loss_of(z, y), z)
    scale, found, *_ = read_cross_entropy(z.detach(), gradient)
    return float(scale), bool(found)


@settings(max_examples=60)
@given(
    factor=st.floats(1e-4, 1e5),
    classes=st.integers(2, 40),
    rows=st.integers(2, 40),
    spread=st.floats(0.5, 6.0),
    seed=st.integers(0, 10_000),
)
def test_cross_entropy_gives_its_factor(factor, classes, rows, spread, seed):
    if classes == 2:  # a few labels that are all unlikely may be the other class's
        rows = max(rows, 8)
    scale, found = recover(lambda z, y: factor * F.cross_entropy(z, y), rows, classes, spread, seed=seed)
    assert found
    assert scale == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "loss", "expected"),
    [
        ("sum", lambda z, y: 0.5 * F.cross_entropy(z, y, reduction="sum"), 0.5 * 32),
        ("ignored rows", lambda z, y: 8 * F.cross_entropy(z, y.where(y != 3, -100)), 8),
        (
            "label smoothing and ignored rows",
            lambda z, y: 3 * F.cross_entropy(z, y.where(y < 6, -100), label_smoothing=0.2),
            3,
        ),
        ("label smoothing", lambda z, y: 3 * F.cross_entropy(z, y, label_smoothing=0.1), 3),
        ("nll of log_softmax", lambda z, y: 2 * F.nll_loss(F.log_softmax(z, 1), y), 2),
        ("auxiliary loss elsewhere", lambda z, y: F.cross_entropy(z, y) + z.detach().sum(), 1),
    ],
)
def test_forms_that_are_accepted(name, loss, expected):
    scale, found = recover(loss)
    assert found
    assert scale == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_label_smoothing_from_unsure_to_overconfident(spread):
    scale, found = recover(lambda z, y: 3 * F.cross_entropy(z, y, label_smoothing=0.1), spread=spread)
    assert found
    assert scale == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("binary", lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 10).to(z))),
        ("mse", lambda z, y: F.mse_loss(z, F.one_hot(y, 10).to(z))),
        ("mixup", lambda z, y: 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))),
        ("class weights", lambda z, y: F.cross_entropy(z, y, weight=torch.linspace(0.1, 3, 10).to(z))),
        ("sample weights", lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.rand(32)).mean()),
        ("focal", lambda z, y: focal(z, y)),
        ("temperature in the loss", lambda z, y: F.cross_entropy(z / 2, y)),
        ("distillation", lambda z, y: F.cross_entropy(z, F.softmax(z.detach().flip(0), 1))),
        ("negated", lambda z, y: -F.cross_entropy(z, y)),
        ("with a logit penalty", lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean()),
    ],
)
def test_other_losses_are_refused_and_get_factor_one(name, loss):
    assert recover(lambda z, y: 64 * loss(z, y)) == (1.0, False)


@pytest.mark.parametrize(
    ("rows", "spread", "loss"),
    [
        (32, 0.03, lambda z, y: F.cross_entropy(z / 2, y)),
        (1, 0.01, lambda z, y: F.mse_loss(z, F.one_hot(y, 10).to(z))),
        (1, 0.03, lambda z, y: F.cross_entropy(z, y) + z.square().mean()),
    ],
    ids=["temperature in the loss", "mse", "with a logit penalty"],
)
def test_nearly_uniform_predictions_do_not_make_another_loss_pass_for_label_smoothing(rows, spread, loss):
    """To first order in the logits such losses are linear in p there, as under smoothing, with slopes of their own."""
    assert recover(lambda z, y: 64 * loss(z, y), rows=rows, spread=spread) == (1.0, False)


def focal(z, y):
    p = F.softmax(z, 1).gather(1, y[:, None])
    return ((1 - p) ** 2 * -p.log()).mean()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
def test_low_precision_gradients(dtype, tolerance):
    factor = 1024.0 if dtype == torch.float16 else 0.25
    scale, found = recover(lambda z, y: factor * F.cross_entropy(z.float(), y), rows=64, dtype=dtype)
    assert found
    assert scale == pytest.approx(factor, rel=tolerance)


def test_confident_rows_whose_gradient_vanishes_in_float16_still_count():
    z = torch.tensor([[30.0, 0.0, 0.0], [0.0, 1.0, 0.5]], dtype=torch.float16, requires_grad=True)
    (gradient,) = torch.autograd.grad(4 * F.cross_entropy(z.float(), torch.tensor([0, 1])), z)
    assert gradient[0].abs().max() == 0
    scale, found, *_ = read_cross_entropy(z.detach(), gradient)
    assert found
    assert scale == pytest.approx(4.0, rel=1e-2)


def trained(factor, data=None, loss=F.cross_entropy, **options):
    """Train with the loss multiplied by a factor and the gradients divided by it: the factor must cancel."""
    model = mlp()
    optimizer = DCLOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model, **{"weight": 1.0} | options
    )
    for x, y in data or batches(30):
        optimizer.zero_grad()
        (factor * loss(model(x), y)).backward()
        for parameter in model.parameters():
            parameter.grad /= factor
        optimizer.step()
    return model, optimizer


def squared(z, y):  # of which the factor cannot be read
    return F.mse_loss(z, F.one_hot(y, CLASSES).to(z))


@pytest.mark.parametrize(
    ("loss", "options"),
    [(F.cross_entropy, {}), (F.cross_entropy, {"loss_scale": 512.0}), (F.cross_entropy, {"loss_scale": lambda: 512.0}),
     (nn.CrossEntropyLoss(label_smoothing=0.1), {}), (squared, {"loss_scale": 512.0}),
     (nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2, CLASSES).double()), {"loss_scale": 512.0})],
    ids=["auto", "number", "callable", "label smoothing", "any loss", "class weights"],
)  # fmt: skip
def test_penalty_and_chase_carry_the_factor(loss, options):
    scaled, first = trained(512.0, loss=loss, **options)
    plain, second = trained(1.0, loss=loss)
    assert_same(scaled, plain, rtol=1e-7, atol=1e-9)
    assert_same(first.companion, second.companion, rtol=1e-7, atol=1e-9)
    assert first.logs()["loss_scale"] == pytest.approx(512.0, rel=1e-6)


def test_given_scale_wins_over_what_the_gradient_says():
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, loss_scale=3.0, weight=1.0)
    x, y = next(iter(batches(1)))
    F.cross_entropy(model(x), y).backward()
    assert optimizer.logs()["loss_scale"] == 3.0


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
@pytest.mark.parametrize("reads", ["auto", "number"])
def test_micro_batches_equal_one_large_batch(variant, reads):
    def run(parts):
        model = mlp()
        options = {"loss_scale": 1 / parts} if reads == "number" else {}
        base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        if variant == "dcl":
            optimizer = DCLOptimizer(base, model, **{"weight": 1.0} | options)
        else:
            optimizer = DCPOptimizer(base, model, CLASSES, **{"weight": 1.0, "alpha": 0.6} | options)
        for x, y in batches(20, size=24):
            optimizer.zero_grad()
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(a), b) / parts).backward()
            optimizer.step()
        return model, optimizer

    (one, first), (several, second) = run(1), run(3)
    assert_same(one, several, rtol=1e-10, atol=1e-10)
    if variant == "dcl":
        assert_same(first.companion, second.companion, rtol=1e-10, atol=1e-10)
    else:
        assert_same(first.prototypes, second.prototypes, rtol=1e-10, atol=1e-10)


def test_unequal_micro_batches_weigh_as_the_loss_weighs_them():
    """Sum over rows divided by the total count: parts of 20 and 4 rows must equal one batch of 24."""

    def run(sizes):
        model = mlp()
        optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model, weight=1.0)
        for x, y in batches(10, size=24):
            optimizer.zero_grad()
            for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
                (F.cross_entropy(model(a), b, reduction="sum") / 24).backward()
            optimizer.step()
        return model, optimizer.companion

    assert_same(run([24])[0], run([20, 4])[0], rtol=1e-10, atol=1e-10)
    assert_same(run([24])[1], run([20, 4])[1], rtol=1e-10, atol=1e-10)


def test_two_views_in_one_backward_both_count():
    """As one forward of both does, whose loss has the factor 2."""
    found = []
    for together in (False, True):
        model = mlp()
        optimizer = DCLOptimizer(sgd(model), model, weight=1.0, companion=mlp(seed=3))
        for x, y in batches(3):
            optimizer.zero_grad()
            if together:
                (2 * F.cross_entropy(model(torch.cat([x, -x])), torch.cat([y, y]))).backward()
            else:
                (F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)).backward()
            optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found, rtol=1e-10, atol=1e-12)


def test_unreadable_factor_is_warned_about_once_and_only_when_it_may_matter():
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, weight=1.0)
    data = list(batches(6))
    for x, y in data[:3]:  # one backward a step in float64: nothing suspicious
        optimizer.zero_grad()
        squared(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    squared(model(data[3][0]), data[3][1]).backward()
    with pytest.warns(UserWarning, match=r"pass .*loss_scale=.*\(1 if"):
        squared(model(data[4][0]), data[4][1]).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squared(model(data[5][0]), data[5][1]).backward()


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("adaptive", ValueError, r"loss_scale='adaptive' is unknown; pass 'auto'"),
        (0.0, ValueError, r"loss_scale=0.0 must be a positive finite number"),
        (float("nan"), ValueError, r"loss_scale=nan"),
        (None, TypeError, r"loss_scale must be 'auto', a number, a GradScaler or a callable, got None"),
        (True, TypeError, r"got True"),
    ],
)
def test_bad_sources(source, error, message):
    with pytest.raises(error, match=message):
        LossScale(source)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, TypeError, r"loss_scale's callable must return a number or a scalar tensor, got None"),
        (torch.ones(2), TypeError, r"loss_scale's callable must return a number or a scalar tensor"),
        (float("nan"), ValueError, r"loss_scale's callable returned nan"),
        (torch.tensor(float("inf")), ValueError, r"loss_scale's callable returned inf"),
    ],
)
def test_a_callable_that_gives_no_factor_is_an_error_before_anything_changes(given, error, message):
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, loss_scale=lambda: given)
    x, y = next(iter(batches(1)))
    with pytest.raises(error, match=message):
        F.cross_entropy(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())
    assert math.isnan(optimizer.logs()["penalty"])


@pytest.mark.parametrize("given", [2, torch.tensor(2.0), torch.tensor([2.0])])
def test_a_callable_may_give_a_number_or_a_scalar_tensor(given):
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, loss_scale=lambda: given)
    x, y = next(iter(batches(1)))
    (2.0 * F.cross_entropy(model(x), y)).backward()
    assert optimizer.logs()["loss_scale"] == 2.0
