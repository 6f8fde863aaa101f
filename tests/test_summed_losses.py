"""A criterion that sums is the mean's times its number of terms: criterion= says the factor that "auto" reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.hooks.criterion import terms_of_sum
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd, unreadable_device

CE = nn.CrossEntropyLoss
Z, Y = torch.randn(6, CLASSES), torch.tensor([0, 1, 2, 3, 4, 0])
SOFT = F.one_hot(Y, CLASSES).float()


@pytest.mark.parametrize(
    ("criterion", "logits", "targets", "terms"),
    [
        (CE(), Z, Y, 1),
        (CE(reduction="none"), Z, Y, 1),
        (CE(reduction="sum"), Z, Y, 6),
        (CE(reduction="sum", ignore_index=0), Z, Y, 4),
        (CE(reduction="sum", ignore_index=0), Z, 0 * Y, 1),
        (CE(reduction="sum"), Z, SOFT, 6),
        (CE(reduction="sum"), Z[0], SOFT[0], 1),
        (CE(reduction="sum", ignore_index=3), Z.expand(2, 6, CLASSES).mT, Y.expand(2, 6), 10),
        (CE(reduction="sum"), Z.expand(2, 6, CLASSES).mT, SOFT.expand(2, 6, CLASSES).mT, 12),
        (nn.NLLLoss(reduction="sum", ignore_index=4), Z, Y, 5),
        (nn.BCEWithLogitsLoss(reduction="sum"), Z, SOFT, 6 * CLASSES),
        (nn.MSELoss(reduction="sum"), Z, SOFT, 6 * CLASSES),
        (nn.KLDivLoss(reduction="sum"), Z, SOFT, 6),
        (nn.MultiLabelSoftMarginLoss(reduction="sum"), Z, SOFT, 6),
        (nn.MultiMarginLoss(reduction="sum"), Z, Y, 6),
        (CE(reduction="sum"), Z[:0], Y[:0], 1),
        (CE(reduction="sum"), Z, None, 6),
    ],
)
def test_terms_are_what_the_mean_divides_by(criterion, logits, targets, terms):
    assert terms_of_sum(criterion, logits, targets) == terms
    if targets is not None and terms > 1 and not isinstance(criterion, nn.KLDivLoss):  # its mean is over elements
        mean = type(criterion)(**{"ignore_index": criterion.ignore_index} if hasattr(criterion, "ignore_index") else {})
        assert_same(mean(logits, targets) * terms, criterion(logits, targets), rtol=1e-6)


def test_terms_are_counted_without_a_look_at_the_device():
    with unreadable_device():
        assert terms_of_sum(CE(reduction="sum"), torch.ones(3, 2), torch.ones(3, dtype=torch.long)).ndim == 0


def summed(z, y):
    return F.cross_entropy(z, y, reduction="sum")


def trained(variant, criterion, factor, sizes=(16,), ignore=None, hand_over=True):
    """Train with micro-batches of the given sizes, the loss multiplied by factor(labels of the whole batch)."""
    model = mlp()
    options = {"criterion": criterion} if hand_over else {}
    if variant == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, **{"weight": 1.0} | options)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, **{"weight": 1.0, "alpha": 0.6} | options)
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


@pytest.mark.parametrize("sizes", [(16,), (12, 4)])
@pytest.mark.parametrize("factor", [labelled, lambda y: 1.0], ids=["divided", "sum"])
@pytest.mark.parametrize("ignore", [None, 3])
def test_criterion_says_what_auto_reads(sizes, factor, ignore):
    said, first = trained("dcl", CE(reduction="sum"), factor, sizes, ignore)
    read, second = trained("dcl", CE(reduction="sum"), factor, sizes, ignore, hand_over=False)
    assert first.logs()["loss_scale"] == pytest.approx(second.logs()["loss_scale"], rel=1e-6)
    assert_same(said, read, rtol=1e-7, atol=1e-9)
    assert_same(first.companion, second.companion, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_unequal_micro_batches_of_a_sum_equal_one_large_batch(variant):
    whole, parts = (trained(variant, CE(reduction="sum"), labelled, sizes) for sizes in ((24,), (20, 4)))
    assert_same(whole[0], parts[0], rtol=1e-10, atol=1e-10)
    if variant == "dcl":
        assert_same(whole[1].companion, parts[1].companion, rtol=1e-10, atol=1e-10)
    else:
        assert_same(whole[1].prototypes, parts[1].prototypes, rtol=1e-10, atol=1e-10)
