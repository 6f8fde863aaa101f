"""DCP's arithmetic: the reference's."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import distances
from dcl_optim.reference import dcp_step
from tests.dcp_forms import CLASSES, FEATURES, batches, network, train, wrap
from tests.helpers import assert_same, cells, live_tensors

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def huber(z: Tensor, c: Tensor) -> Tensor:
    return F.smooth_l1_loss(z, c)


DISTANCES = [*distances.DISTANCES, huber]


# With the mean, and every class in every batch: test_reference.py.
CHOSEN = [("mse", "mean"), ("infonce", "mean"), *((distance, "per_class") for distance in DISTANCES)]


@pytest.mark.parametrize(("distance", "reduction"), cells(itertools.product(DISTANCES, ["mean", "per_class"]), *CHOSEN))
def test_thirty_steps_equal_the_reference(distance, reduction):
    model, theirs, criterion = network(), network(), nn.CrossEntropyLoss()
    optimizer = wrap(model, weight=0.7, alpha=0.4, distance=distance, reduction=reduction)
    plain, known = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), {}
    function = distances.resolve_distance(distance)
    for x, y in batches(30):
        train(model, optimizer, [(x, y)], criterion)
        dcp_step(
            *(theirs, known, plain, x, y, F.cross_entropy, function),
            weight=0.7, alpha=0.4, per_class=reduction == "per_class",
        )  # fmt: skip
        assert optimizer.forecaster.seen.nonzero().flatten().tolist() == sorted(known)
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.prototypes, torch.stack([known[k] for k in range(CLASSES)]), **CLOSE)


@pytest.mark.parametrize("parts", [(20, 30, 10), (3, 4, 2), (1,) * 30], ids=str)
def test_several_forwards_before_a_step_count_as_one(parts):
    """Whether they have more rows than there are classes or fewer."""
    model, criterion, expected = network(), nn.CrossEntropyLoss(), {}
    optimizer = wrap(model, alpha=0.3)
    for x, y in batches(6, size=sum(parts)):
        z = model(x).detach()
        optimizer.zero_grad()
        for rows in torch.arange(len(x)).split(parts):
            (criterion(model(x[rows]), y[rows]) / len(parts)).backward()
        optimizer.step()
        for k in y.unique().tolist():
            mean = z[y == k].mean(0)
            expected[k] = 0.3 * expected[k] + 0.7 * mean if k in expected else mean
        for k, prototype in expected.items():
            assert_same(optimizer.prototypes[k], prototype, **CLOSE)


@pytest.mark.usefixtures("older_objects")
def test_memory_does_not_grow_with_the_forwards_before_a_step():
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = wrap(model)
    train(model, optimizer, batches(2), criterion)
    elements = []
    for x, y in batches(40):
        criterion(model(x), y).backward()
        gc.collect()
        elements.append(live_tensors()[1])
    assert max(elements[20:]) <= max(elements[:20])


@pytest.mark.parametrize("ignored", [-100, 3, 77])
def test_ignored_rows_count_for_nothing(ignored):
    results = []
    for padding in (0, 3):
        model, criterion = network(), nn.CrossEntropyLoss(ignore_index=ignored)
        optimizer = wrap(model)
        for x, y in batches(8):
            x, y = (
                torch.cat([x, 9 * x[:padding]]),
                torch.cat([y.where(y != ignored, 5), y.new_full((padding,), ignored)]),
            )
            train(model, optimizer, [(x, y)], criterion)
        results.append((model.state_dict(), optimizer.prototypes, optimizer.forecaster.seen))
    assert_same(*results, **CLOSE)


def test_ignored_rows_that_are_not_numbers_leave_no_trace():
    model = nn.Identity()
    model.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = wrap(model)
    z = torch.zeros(3, CLASSES, dtype=torch.float64).index_fill_(0, torch.tensor([1]), torch.inf)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.set_targets(torch.tensor([0, -100, 2]))
        (model(z + 0 * model.weight) * torch.tensor([[1.0], [0.0], [1.0]])).sum().backward()
        optimizer.step()
    assert torch.equal(optimizer.prototypes, torch.zeros(CLASSES, CLASSES, dtype=torch.float64))


def mixtures(steps: int):
    """Mixup of two labels a row: few columns have a share, and other ones in each batch."""
    for (x, y), (_, other) in zip(batches(steps), batches(steps, seed=9), strict=True):
        yield x, 0.75 * F.one_hot(y, CLASSES).double() + 0.25 * F.one_hot(other, CLASSES).double()


@pytest.mark.parametrize("distance", ["mse", "kl"])
def test_soft_labels_by_the_formula(distance):
    model, theirs = network(), network()
    optimizer, plain = wrap(model, distance=distance), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    function = distances.resolve_distance(distance)
    values, seen = torch.zeros(CLASSES, CLASSES, dtype=torch.float64), torch.zeros(CLASSES, dtype=torch.bool)
    for x, shares in mixtures(30):
        optimizer.zero_grad()
        optimizer.set_targets(shares)
        F.cross_entropy(model(x), shares).backward()
        optimizer.step()

        z, known = theirs(x), ~((shares > 0) & ~seen).any(1)
        penalty = function(z[known], (shares @ values)[known]) * known.double().mean() if known.any() else 0.0
        plain.zero_grad()
        (F.cross_entropy(z, shares) + penalty).backward()
        plain.step()
        totals = shares.sum(0)[:, None]
        means = shares.T @ z.detach() / totals.clamp(min=1e-30)
        moved = torch.where(seen[:, None], 0.6 * values + 0.4 * means, means)
        values, seen = torch.where(totals > 0, moved, values), seen | (totals[:, 0] > 0)
        assert_same(optimizer.forecaster.seen, seen)
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.prototypes, values, **CLOSE)


def test_hard_and_soft_labels_may_alternate_within_a_step():
    model = network()
    optimizer = wrap(model)
    (x, y), = batches(1)  # fmt: skip
    for labels in (y, F.one_hot(y, CLASSES).double()):
        optimizer.set_targets(labels)
        F.cross_entropy(model(x), labels).backward()
    z = model(x).detach()
    optimizer.step()
    for k in y.unique():
        assert_same(optimizer.prototypes[k], z[y == k].mean(0), **CLOSE)


def test_a_step_that_is_forgotten_leaves_nothing():
    results = []
    for with_skipped in (False, True):
        model, criterion = network(), nn.CrossEntropyLoss()
        optimizer = wrap(model)
        train(model, optimizer, batches(4), criterion)
        if with_skipped:
            criterion(model(torch.randn(9, FEATURES, dtype=torch.float64)), torch.full((9,), CLASSES - 1)).backward()
            optimizer.zero_grad()
        train(model, optimizer, batches(2, seed=3), criterion)
        results.append((model.state_dict(), optimizer.prototypes, optimizer.forecaster.seen))
    assert_same(*results)
    assert not results[0][2].all()


def test_weight_zero_leaves_the_training_untouched_and_still_learns():
    model, plain, criterion = network(), network(), nn.CrossEntropyLoss()
    optimizer = wrap(model, weight=0.0)
    train(model, optimizer, batches(10), criterion)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), batches(10), criterion)
    assert_same(model, plain)
    assert optimizer.forecaster.seen.any()


def test_a_custom_distance_may_keep_what_it_was_called_with():
    """What it was called with is not written over."""
    kept = []

    def distance(z: Tensor, c: Tensor) -> Tensor:
        kept.append((c, c.clone()))
        return F.mse_loss(z, c)

    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = wrap(model, distance=distance)
    train(model, optimizer, list(batches(1)) * 5, criterion)
    assert len(kept) == 4
    for held, copied in kept:
        assert_same(held, copied)
