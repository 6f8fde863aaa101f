"""The step, with a closure and without, and the figures that it leaves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer
from tests.helpers import (
    assert_same,
    backward,
    batches,
    mlp,
    one,
    sgd,
    train,
    wrap,
)


def test_step_returns_the_loss_without_the_penalty():
    model = mlp()
    optimizer = wrap(model, companion=mlp(seed=3), weight=10.0)
    x, y = one()
    expected = F.cross_entropy(mlp()(x), y).item()
    assert optimizer.step(lambda: F.cross_entropy(model(x), y)).item() == pytest.approx(expected, abs=1e-12)


def test_exception_in_the_closure_leaves_everything_usable():
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, batches(2))
    before = [p.detach().clone() for m in (model, optimizer.companion) for p in m.parameters()]

    def fails():
        optimizer.zero_grad()
        backward(model, *one())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    assert_same([p.detach() for m in (model, optimizer.companion) for p in m.parameters()], before)

    other = mlp()
    calm = wrap(other)
    train(other, calm, batches(2))
    for m, o in ((model, optimizer), (other, calm)):
        train(m, o, batches(2, seed=5))
    assert_same(model, other)
    assert_same(optimizer.companion, calm.companion)


def test_the_companion_learns_from_the_first_of_several_evaluations():
    model = mlp()
    companion, chasing = mlp(seed=3), mlp(seed=3)
    base = torch.optim.LBFGS(model.parameters(), max_iter=4)
    optimizer = DCLOptimizer(base, model, companion=companion, companion_optimizer=sgd(companion, lr=1.0))
    x, y = one()
    z, c, evaluations = model(x).detach(), chasing(x), []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        evaluations.append(loss)
        return loss

    optimizer.step(closure)
    assert len(evaluations) > 1
    F.mse_loss(c, 0.6 * c.detach() + 0.4 * z).backward()
    sgd(chasing, lr=1.0).step()
    assert_same(companion, chasing, rtol=1e-9, atol=1e-11)


def test_logs():
    model = mlp()
    optimizer = wrap(model, weight=lambda t: 0.1 * t, alpha=0.25, companion=mlp(seed=3))
    before = optimizer.logs()
    assert before.pop("step") == 0.0
    assert list(before) == ["penalty", "weight", "alpha", "loss_scale"]
    assert all(map(math.isnan, [*before.values(), optimizer.penalty]))
    x, y = one()
    expected = F.mse_loss(model(x), optimizer.companion(x)).item()
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()
    logs = optimizer.logs()
    assert logs["penalty"] == optimizer.penalty == pytest.approx(expected, abs=1e-12)
    assert (logs["step"], logs["weight"], logs["alpha"]) == (1.0, 0.1, 0.25)
    assert optimizer.logs(prefix="dcl/") == {f"dcl/{name}": value for name, value in logs.items()}
    assert logs["loss_scale"] == pytest.approx(1.0)
