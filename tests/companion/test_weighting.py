"""What each forward pass counts for in the companion's step, also where factors are 0 or negative; 16 bits."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_same, batches, mlp, sgd, wrap
from tests.reference import NEAR, loss_of

by_the_line = partial(loss_of, way="line")


def another_loss_with_the_term(optimizer, x, y):
    z = optimizer.model(x)
    return F.mse_loss(z, torch.ones_like(z)) + optimizer.penalty(z)


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize(
    ("loss", "factors"),
    [
        (by_the_line, (3.0, 1.0)),
        (by_the_line, (0.0, 1.0)),
        (another_loss_with_the_term, (2.0, -1.0)),
        (another_loss_with_the_term, (1.0, 0.0)),
        (another_loss_with_the_term, (0.0, 0.0)),
    ],
)
def test_companion_learns_the_mean_weighted_by_the_factors_of_the_losses(loss, factors, together):
    """Of the forward passes of a step, in one backward pass or several, each weighs by the size of its factor.

    If the factor on the term is 0 in all of them, as in a warm-up, they weigh equally. With a negative one the
    companion does not run away.
    """
    model = mlp()
    optimizer = wrap(model, weight=0.0, alpha=0.4)
    companion = copy.deepcopy(model)
    theirs = sgd(companion)
    sizes = [abs(factor) for factor in factors] if any(factors) else [1.0 for _ in factors]
    data = list(batches(8))
    for pair in zip(data[::2], data[1::2], strict=True):
        theirs.zero_grad()
        for size, (x, _) in zip(sizes, pair, strict=True):
            z, c = model(x).detach(), companion(x)
            (F.mse_loss(c, 0.4 * c.detach() + 0.6 * z) * (size / sum(sizes))).backward()
        theirs.step()
        optimizer.zero_grad()
        losses = (factor * loss(optimizer, *batch) for factor, batch in zip(factors, pair, strict=True))
        if together:
            sum(losses).backward()
        else:
            for one in losses:
                one.backward()
        optimizer.step()
        assert_same(optimizer.companion, companion, **NEAR)


def test_a_batch_whose_loss_counts_for_nothing_teaches_nothing():
    optimizer = wrap(mlp(), alpha=0.4)
    theirs = []
    optimizer.companion_optimizer.register_step_pre_hook(lambda *_: theirs.append(None))
    for factor, batch in zip((1.0, 1.0, 1.0, 0.0), batches(4), strict=True):
        optimizer.zero_grad()
        (factor * by_the_line(optimizer, *batch)).backward()
        optimizer.step()
    assert len(theirs) == 2  # the second and the third; a copy's first gradient is zero


@pytest.mark.parametrize("factors", [(0.0, 1.0), (1e-6, 1.0), (1.0, 1.0)])
def test_factors_of_different_sizes_do_not_overflow_in_float16(factors):
    """The second forward pass alone moves the companion, or both alike."""
    moved = []
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(dtype)
        companion = copy.deepcopy(model)
        companion.weight.data += 1.0
        before = companion.weight.detach().clone()
        optimizer = wrap(model, companion=companion, alpha=0.0)
        for number, factor in enumerate(factors):
            z = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).to(dtype))
            (0.0 * z.float().square().mean() + factor * optimizer.penalty(z)).backward()
        optimizer.step()
        moved.append((companion.weight - before).float())
    assert moved[1].abs().min() > 0
    assert_same(*moved, rtol=0.05, atol=2e-3)
