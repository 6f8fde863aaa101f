"""Scores of the rows of a batch against each other (CLIP), which have no classes, are refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from dcl_optim.pytorch import synchronization
from tests.helpers import fit, sgd
from tests.reference import GOES_ON_BY_THE_TERM

CLASSES, FEATURES = 12, 5


def network():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES).double()


def wrap(model, **options):
    return DCPOptimizer(sgd(model), model, **options)


def batches(steps, size=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, size, FEATURES, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(CLASSES, (steps, size), generator=generator), strict=True))


class Retrieval(nn.Module):
    """As CLIP: row i of the scores is x's row i against each row of w."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4), scale

    def forward(self, x):
        w = x + 0.1 * x.roll(1, 1)
        return self.scale * F.normalize(self.first(x), dim=1) @ F.normalize(self.second(w), dim=1).T


def in_batch(scale=1.0, **options):
    model = Retrieval(scale)
    x = torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(0))
    return DCPOptimizer(sgd(model), model, **options), model(x), torch.arange(32)


IN_BATCH = r"(?s)labels of this batch are its rows' places.*in-batch negatives.*DCLOptimizer.*pass num_classes=32"


@pytest.mark.parametrize("scale", [1.0, 5.0, 14.0, 50.0])
def test_negatives_in_the_batch_are_refused_as_soon_as_they_are_read(scale):
    """At CLIP's temperatures the labels are read as soft ones, and rows of which the model is certain may have none."""
    _, z, y = in_batch(scale)
    loss = F.cross_entropy(z, y)
    with pytest.raises(ValueError, match=IN_BATCH):
        loss.backward()


@pytest.mark.parametrize("labels", [lambda y: y, lambda y: y.where(y > 9, -100), lambda y: F.one_hot(y).float()])
def test_negatives_in_the_batch_are_refused_as_soon_as_they_are_given(labels):
    optimizer, z, y = in_batch()
    for _ in range(2):
        with pytest.raises(ValueError, match=IN_BATCH):
            optimizer.penalty(z, labels(y))


def test_where_values_are_rarely_read_they_are_refused_in_the_next_step_that_reads(monkeypatch):
    monkeypatch.setattr(synchronization, "may_sync", lambda step, tensor: step == 4)
    model = network()
    optimizer = DCPOptimizer(sgd(model), model)
    for step, (x, _) in enumerate(batches(4, CLASSES), 1):
        optimizer.zero_grad()
        z = model(x)
        if step < 4:
            optimizer.penalty(z, torch.arange(CLASSES)).backward()
            optimizer.step()
    with pytest.raises(ValueError, match="in-batch negatives"):
        optimizer.penalty(z, torch.arange(CLASSES))


@pytest.mark.parametrize(
    ("first", "options"),
    [
        (torch.arange(CLASSES), {"num_classes": CLASSES}),
        (torch.arange(CLASSES + 1).div(3).long(), {}),
        (torch.zeros(CLASSES).long(), {}),
        (torch.arange(CLASSES - 1), {}),
        (torch.arange(CLASSES).flip(0), {}),
        (torch.arange(CLASSES).where(torch.arange(CLASSES) < 2, -100), {}),
        (None, {}),
    ],
    ids=[
        "classes by num_classes",
        "a sorted loader",
        "one class",
        "fewer rows",
        "another order",
        "few labels",
        "a resumed run",
    ],
)
@GOES_ON_BY_THE_TERM
@pytest.mark.parametrize("by_term", [False, True])
def test_other_first_batches_are_not_and_no_later_one_is(first, options, by_term):
    """What came before a resumed run is not known: a single batch would decide."""
    model = network()
    before = wrap(model)
    fit(before, batches(5))
    optimizer = wrap(model, **options)
    (x, y), _ = batches(2, CLASSES + 1)
    if first is None:
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    for labels in (torch.arange(CLASSES),) if first is None else (first, y, torch.arange(CLASSES)):
        optimizer.zero_grad()
        z = model(x[: len(labels)])
        loss = F.cross_entropy(z, labels)
        (loss + optimizer.penalty(z, labels) if by_term else loss).backward()
        optimizer.step()
    assert not math.isnan(optimizer.logs()["penalty"])


def test_fewer_than_eight_rows_are_never_taken_for_scores():
    """They lie in the order of their labels by chance."""
    model = nn.Linear(FEATURES, 7)
    optimizer = DCPOptimizer(sgd(model), model)
    fit(optimizer, [(torch.randn(7, FEATURES), torch.arange(7))])
    assert optimizer.logs()["step"] == 1


def test_a_state_from_before_the_first_batch_looks_at_the_first_one():
    model = network()
    again = wrap(model)
    before = copy.deepcopy(again.state_dict())
    fit(again, batches(3))
    again.load_state_dict(before)
    z = model(torch.randn(CLASSES, FEATURES).double())
    with pytest.raises(ValueError, match="in-batch negatives"):
        again.penalty(z, torch.arange(CLASSES))
