"""The fast path against the algorithm written out: 50 steps in float64, every distance, both variants and loops."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from tests import reference
from tests.helpers import CLASSES, MODELS, assert_same, batches, cells, every, huber, seen, sgd
from tests.reference import dcp_step, train, train_by_closures, train_by_hand

STEPS = 50
METHOD = {"weight": 0.7, "alpha": 0.4}
BASES = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "adamw": partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-2),
}


DISTANCES = reference.DISTANCES | {
    "kl_cold": partial(distances.kl, temperature=1.5),
    "infonce_warm": partial(distances.infonce, temperature=0.5),
    "callable": huber,
}
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def run(optimizer, loop):
    way, _, closes = loop.partition(", ")
    if closes:
        train_by_closures(optimizer, batches(STEPS), F.cross_entropy, way)
    else:
        train(optimizer, batches(STEPS), way, F.cross_entropy)


WAYS = ["line", "line, closure", "term", "term, closure"]
LOOPS = list(itertools.product(BASES, MODELS, WAYS))


@pytest.mark.parametrize(("base", "kind", "loop"), every(7, LOOPS))
def test_dcl_equals_reference_in_every_loop(base, kind, loop):
    check_dcl(base, kind, loop, "mse")


@pytest.mark.parametrize(
    ("base", "distance"),
    cells(itertools.product(BASES, DISTANCES), *zip(itertools.cycle(BASES), DISTANCES, strict=False)),
)
def test_dcl_equals_reference_with_every_distance(base, distance):
    check_dcl(base, "batch_norm", "line", distance)


def check_dcl(base, kind, loop, distance):
    function = DISTANCES[distance]
    given = distance if distance in reference.DISTANCES else function
    model = MODELS[kind]()
    theirs = copy.deepcopy(model)
    optimizer = DCLOptimizer(BASES[base](model.parameters()), model, distance=given, **METHOD, companion_fraction=1)
    torch.manual_seed(5)
    run(optimizer, loop)
    torch.manual_seed(5)
    _, companion = train_by_hand(
        theirs, lambda network: BASES[base](network.parameters()), batches(STEPS), distance=function, **METHOD
    )
    assert_same((model, optimizer.companion), (theirs, companion), **CLOSE)
    start = MODELS[kind]()
    assert (start[0].weight - companion[0].weight).abs().max() > 1e-2, "the companion has to have moved"
    assert (model[0].weight - companion[0].weight).abs().max() > 1e-3, "and not to where the model is"


@pytest.mark.parametrize(("base", "kind", "loop"), every(7, LOOPS))
def test_dcp_equals_reference_in_every_loop(base, kind, loop):
    model = MODELS[kind]()
    theirs, prototypes, numbers = copy.deepcopy(model), {}, {}
    optimizer = DCPOptimizer(BASES[base](model.parameters()), model, **METHOD)
    torch.manual_seed(5)
    run(optimizer, loop)

    plain = BASES[base](theirs.parameters())
    torch.manual_seed(5)
    for x, y in batches(STEPS):
        dcp_step(theirs, prototypes, plain, x, y, F.cross_entropy, distances.mse, numbers=numbers, **METHOD)

    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.prototypes, torch.stack([prototypes[k] for k in range(CLASSES)]), **CLOSE)


def test_one_dcl_step_by_hand():
    """z = 2, c = 1: with mse over one class the penalty pulls by 2(z-c), the chase by 2(1-alpha)(c-z)."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    companion = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(2.0)
    companion.weight.data.fill_(1.0)
    optimizer = DCLOptimizer(
        sgd(model),
        model,
        weight=3.0,
        alpha=0.75,
        companion=companion,
        companion_fraction=1,
    )
    z = model(torch.ones(1, 1, dtype=torch.float64))
    (z.sum() + optimizer.penalty(z)).backward()  # the task's gradient is 1
    optimizer.step()
    assert model.weight.item() == pytest.approx(2.0 - 0.1 * (1.0 + 3.0 * 2.0), abs=1e-15)
    assert companion.weight.item() == pytest.approx(1.0 - 0.1 * 2.0 * 0.25 * (1.0 - 2.0), abs=1e-15)
    assert optimizer.logs()["penalty"] == 1.0


def test_two_dcp_steps_by_hand():
    """Class 0 is seen first at z = (2, 0), which becomes its prototype; the second batch is pulled to it."""
    model = torch.nn.Linear(2, 2, bias=False).double()
    model.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, alpha=0.25, weight=1.0)
    for shift in (1.0, 0.0):
        optimizer.zero_grad()
        z = model(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
        (shift * z[0, 0] + optimizer.penalty(z, torch.tensor([0]))).backward()
        optimizer.step()
    # step 1: no prototype yet, W00 = 2 - 0.5 * 1 = 1.5; step 2: gradient 2 (1.5 - 2) / 2 = -0.5, W00 = 1.75
    assert model.weight[0, 0].item() == 1.75
    # two rows, of which the first one weighs a quarter: n = 1.25
    assert optimizer.prototypes.tolist() == [[pytest.approx((0.25 * 2.0 + 1.5) / 1.25), 0.0], [0.0, 0.0]]
    assert seen(optimizer).tolist() == [True, False]
