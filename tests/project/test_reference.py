"""dcl_optim/reference.py trains as the optimizers do, in float64, and is short."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer, reference
from tests.helpers import assert_same, sgd, wrap
from tests.reference import EACH_WAY, train

FEATURES, ROWS, STEPS = 20, 80, 30
CLOSE = {"atol": 1e-12}


def network(classes, dropout=0.0):
    """Of logits so large that some rows of four classes are where mse is linear."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, classes)).double()
    model[3].weight.data *= 4
    return model


def batches(classes):
    """Rows around a center for each class. Each batch lacks one class, and a tenth of the rows is ignored."""
    torch.manual_seed(1)
    centers = 4 * torch.randn(classes, FEATURES, dtype=torch.float64)
    found = []
    for step in range(STEPS):
        y = torch.randint(classes - 1, (ROWS,))
        y += y >= step % classes
        x = centers[y] + 0.1 * torch.randn(ROWS, FEATURES, dtype=torch.float64)
        found.append((x, y.masked_fill(torch.rand(ROWS) < 0.1, -100)))
    return found


@pytest.mark.parametrize("part", ["distance", "dcp", "dcl"])
def test_each_part_has_at_most_60_lines(part):
    text = Path(reference.__file__).read_text(encoding="utf-8")
    (code,) = re.findall(rf"start:{part}\](.*?)# --8<-- \[end:{part}\]", text, re.DOTALL)
    assert len(code.strip().splitlines()) <= 60


@EACH_WAY
def test_dcp_with_a_fixed_weight(way):
    model, prototypes = network(4), reference.Prototypes(4, weight=0.7).double()
    reference.train_dcp(model, sgd(model), prototypes, batches(4))
    expected = network(4)
    optimizer = DCPOptimizer(sgd(expected), expected, weight=0.7)
    train(optimizer, batches(4), way, F.cross_entropy)
    assert_same(model, expected, **CLOSE)
    assert_same(prototypes.values, optimizer.prototypes, **CLOSE)


def test_dcp_with_the_automatic_weight():
    """With 60 classes, so that the weight leaves its floor of 0.1."""
    model, prototypes = network(60), reference.Prototypes(60).double()
    reference.train_dcp(model, sgd(model), prototypes, batches(60))
    expected = network(60)
    optimizer = DCPOptimizer(sgd(expected), expected)
    train(optimizer, batches(60), loss=F.cross_entropy)
    assert optimizer.logs()["weight"] > 0.2
    assert_same(model, expected, atol=1e-6)  # the optimizer's counts may be in float32
    assert_same(prototypes.values, optimizer.prototypes, atol=1e-6)


@EACH_WAY
def test_dcl(way):
    """With dropout, whose masks both networks have, and an alpha with which the companion moves."""
    data = batches(4)
    model = network(4, dropout=0.2)
    companion = reference.Companion(model, lambda parameters: sgd(nn.ParameterList(parameters)), 0.7, 0.5)
    torch.manual_seed(2)
    reference.train_dcl(sgd(model), companion, data)
    expected = network(4, dropout=0.2)
    before = copy.deepcopy(expected)
    optimizer = wrap(expected, weight=0.7, alpha=0.5)
    torch.manual_seed(2)
    train(optimizer, data, way, F.cross_entropy)
    assert_same(model, expected, **CLOSE)
    assert_same(companion.network, optimizer.companion, **CLOSE)
    assert not torch.equal(before[3].weight, companion.network[3].weight)
