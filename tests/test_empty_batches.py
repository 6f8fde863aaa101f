"""A batch without rows, as the last one of a sum over rows may be: harmless, as it is to the plain optimizer."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import DISTANCES, resolve_distance, value_and_gradient
from dcl_optim.hooks.cross_entropy import read_cross_entropy
from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, sgd

EMPTY = torch.empty(0, FEATURES, dtype=torch.float64), torch.empty(0, dtype=torch.long)


@pytest.mark.parametrize("distance", [*DISTANCES, F.smooth_l1_loss])
def test_distance_of_nothing_is_zero(distance):
    z = torch.empty(0, 3)
    given = resolve_distance(distance)
    assert_same(value_and_gradient(given, z, z), (torch.zeros(()), z))


def test_factor_of_nothing_is_one_and_no_reason_to_warn():
    z = torch.empty(0, 3, dtype=torch.float16)
    assert read_cross_entropy(z, z)[:2] == (1.0, False)


def summed(z, y):
    return F.cross_entropy(z, y, reduction="sum")


def squares(z, y):
    return F.mse_loss(z, F.one_hot(y, CLASSES).to(z), reduction="sum")


def trained(variant, with_empty, loss, soft=False, **options):
    model = mlp()
    if variant == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, **{"weight": 1.0} | options)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, **{"weight": 1.0, "alpha": 0.6} | options)
    for batch in batches(4):
        optimizer.zero_grad()
        for x, y in [EMPTY, batch, EMPTY] if with_empty else [batch]:
            if variant == "dcp":
                optimizer.set_targets(F.one_hot(y, CLASSES).double() if soft else y)
            (loss(model(x), y) / 16).backward()
        optimizer.step()
    learned = optimizer.companion if variant == "dcl" else optimizer.prototypes
    return model.state_dict(), learned.state_dict() if variant == "dcl" else learned


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("loss", [summed, squares])
def test_companion_learns_as_without_it(distance, loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if loss is squares else "error")  # of the batch itself
        found = [trained("dcl", with_empty, loss, distance=distance) for with_empty in (False, True)]
    assert_same(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", [*({"distance": name} for name in DISTANCES), {"reduction": "per_class"}], ids=str)
def test_prototypes_learn_as_without_it(options):
    found = [trained("dcp", with_empty, summed, **options) for with_empty in (False, True)]
    assert_same(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("distance", DISTANCES)
def test_soft_prototypes_learn_as_without_it(distance):
    found = [trained("dcp", with_empty, summed, soft=True, distance=distance) for with_empty in (False, True)]
    assert_same(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_step_on_nothing_else(variant):
    model, plain = mlp(), mlp()
    base = sgd(model)
    optimizer = (
        DCLOptimizer(base, model, weight=1.0)
        if variant == "dcl"
        else DCPOptimizer(base, model, CLASSES, weight=1.0, alpha=0.6)
    )
    theirs = sgd(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for network, its in ((model, optimizer), (plain, theirs)):
                if network is model and variant == "dcp":
                    optimizer.set_targets(EMPTY[1])
                its.zero_grad()
                summed(network(EMPTY[0]), EMPTY[1]).backward()
                its.step()
    assert_same(model, plain)
    assert optimizer.penalty == 0.0
