"""A loss that sums is the mean times its number of rows, which its gradient says."""

from __future__ import annotations

import pytest
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd

CE = nn.CrossEntropyLoss


def trained(variant, criterion, factor, sizes=(16,), ignore=None):
    """Train with micro-batches of the given sizes, the loss multiplied by factor(labels of the whole batch)."""
    model = mlp()
    if variant == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=1.0, alpha=0.6)
    for x, y in batches(6, size=sum(sizes)):
        if ignore is not None:
            y = y.where(y != ignore, -100)
        optimizer.zero_grad()
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            (factor(y) * criterion(model(a), b)).backward()
        optimizer.step()
    return model, optimizer


def labelled(y):
    return 1 / (y != -100).sum().item()


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
@pytest.mark.parametrize("ignore", [None, 3])
def test_a_sum_over_the_rows_equals_the_mean(variant, ignore):
    summed, first = trained(variant, CE(reduction="sum"), labelled, ignore=ignore)
    mean, second = trained(variant, CE(), lambda y: 1.0, ignore=ignore)
    assert first.logs()["loss_scale"] == pytest.approx(second.logs()["loss_scale"])
    assert_same(summed, mean, rtol=1e-9, atol=1e-10)
    if variant == "dcl":
        assert_same(first.companion, second.companion, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_unequal_micro_batches_of_a_sum_equal_one_large_batch(variant):
    whole, parts = (trained(variant, CE(reduction="sum"), labelled, sizes) for sizes in ((24,), (20, 4)))
    assert_same(whole[0], parts[0], rtol=1e-10, atol=1e-10)
    if variant == "dcl":
        assert_same(whole[1].companion, parts[1].companion, rtol=1e-10, atol=1e-10)
    else:
        assert_same(whole[1].prototypes, parts[1].prototypes, rtol=1e-10, atol=1e-10)
