"""What each forward pass counts for in the companion's step, also where factors are 0 or negative; 16 bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from tests.helpers import assert_same, batches, mlp, sgd, wrap


def loss_by_the_line(optimizer: DCLOptimizer, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(optimizer.model(x), y)


def loss_with_the_term(optimizer: DCLOptimizer, x: Tensor, y: Tensor) -> Tensor:
    z = optimizer.model(x)
    return F.mse_loss(z, torch.ones_like(z)) + optimizer.penalty(z)


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize(
    ("loss", "factors"),
    [
        (loss_by_the_line, (3.0, 1.0)),
        (loss_by_the_line, (0.0, 1.0)),
        (loss_with_the_term, (2.0, -1.0)),
        (loss_with_the_term, (1.0, 0.0)),
    ],
)
def test_companion_learns_the_mean_weighted_by_the_factors_of_the_losses(loss, factors, together):
    """Of the forward passes of a step, in one backward pass or several: divided by the sum of the factors' sizes."""
    model = mlp()
    optimizer = wrap(model, weight=0.0, alpha=0.4)
    companion = copy.deepcopy(model)
    theirs, total = sgd(companion), sum(map(abs, factors))
    data = list(batches(8))
    for pair in zip(data[::2], data[1::2], strict=True):
        theirs.zero_grad()
        for factor, (x, _) in zip(factors, pair, strict=True):
            z, c = model(x).detach(), companion(x)
            (F.mse_loss(c, 0.4 * c.detach() + 0.6 * z) * (factor / total)).backward()
        theirs.step()
        optimizer.zero_grad()
        losses = (factor * loss(optimizer, *batch) for factor, batch in zip(factors, pair, strict=True))
        if together:
            sum(losses).backward()
        else:
            for one in losses:
                one.backward()
        optimizer.step()
        assert_same(optimizer.companion, companion, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", [loss_by_the_line, loss_with_the_term])
def test_a_batch_that_counts_for_nothing_teaches_nothing(loss):
    """By the term the companion's optimizer steps as the model's does, with a gradient of zero: momentum goes on."""
    optimizer = wrap(mlp(), alpha=0.4)
    theirs = []
    optimizer.companion_optimizer.register_step_pre_hook(
        lambda own, *_: theirs.append([p.grad.clone() for group in own.param_groups for p in group["params"]])
    )
    for factor, batch in zip((1.0, 1.0, 0.0), batches(3), strict=True):
        optimizer.zero_grad()
        (factor * loss(optimizer, *batch)).backward()
        optimizer.step()
    assert any(gradient.any() for gradient in theirs[1])
    if loss is loss_by_the_line:
        assert len(theirs) == 2
        return
    assert len(theirs[2]) == len(theirs[1])
    assert not any(gradient.any() for gradient in theirs[2])


# ---- in 16 bits the companion learns as in float32 -------------------------------------------------------------------


def flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in network.parameters()])


def companions_way(rows: int, classes: int, gap: float, autocast: torch.dtype | None, scale: float) -> Tensor:
    """How far a companion that starts apart from the model by a gap moves in one step of two forward passes."""
    torch.manual_seed(0)
    model, companion = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes)) for _ in range(2))
    companion.load_state_dict(model.state_dict())
    for parameter in companion.parameters():
        parameter.data += gap * parameter.std() * torch.randn_like(parameter)
    before = flat(companion)
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, companion=companion, weight=0.0)
    x, y = torch.randn(rows, 32), torch.arange(rows) % classes
    for _ in range(2):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = F.cross_entropy(model(x).float(), y)
        (0.5 * scale * loss).backward()
    optimizer.step()
    return flat(companion) - before


@pytest.mark.parametrize(
    ("dtype", "scale", "rows", "classes", "gap"),
    [
        (torch.float16, 1.0, 256, 1000, 0.01),
        (torch.float16, 2.0**20, 64, 10, 4.0),
        (torch.bfloat16, 1.0, 1024, 100, 0.3),
    ],
)
def test_under_autocast_the_companions_step_is_float32s(dtype, scale, rows, classes, gap):
    """Whatever the loss is multiplied by: without it each gradient is below float16's smallest number, with 2**20 above
    its largest one."""
    single = companions_way(rows, classes, gap, None, 1.0)
    half = companions_way(rows, classes, gap, dtype, scale)
    assert (half - single).norm() < 0.05 * single.norm()
