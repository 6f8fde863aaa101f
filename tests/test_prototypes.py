"""The prototypes: penalty and update against the reference, soft labels, labels to rows, figures, state, two ranks."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcl_optim import DCPOptimizer, _sync, distances, prototypes
from dcl_optim.distances import to_rows
from dcl_optim.forward import Forward
from dcl_optim.reference import dcp_step
from tests.helpers import assert_same, live_tensors, train

CLASSES, FEATURES, ROWS = 12, 5, 8  # fewer rows than classes
KEY = "dcl_optim.DCPOptimizer"
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
NAN, INF = float("nan"), float("inf")


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES)).to(dtype)


def wrap(model: nn.Module, lr: float = 0.1, **options: Any) -> DCPOptimizer:
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return DCPOptimizer(base, model, **{"num_classes": CLASSES, "weight": 1.0, "alpha": 0.6} | options)


def batches(steps: int, size: int = ROWS, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Small enough for classes to be absent, and to come for the first time late."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        known = 4 + step % (CLASSES - 3)
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        yield x, torch.randint(known, (size,), generator=generator)


def one_hot(y: Tensor, classes: int = CLASSES) -> Tensor:
    return F.one_hot(y, classes).double()


class Logits(nn.Module):
    """Gives its input as logits, plus a parameter that stays 0 with a learning rate of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.zero


def step_on(model: nn.Module, optimizer: DCPOptimizer, z: Tensor, labels: Tensor) -> None:
    """One step with labels that are given; with :class:`Logits` z are the logits."""
    optimizer.zero_grad()
    optimizer.set_targets(labels)
    model(z).nan_to_num(0.0, 0.0, 0.0).sum().backward()
    optimizer.step()


def know(optimizer: DCPOptimizer, values: Tensor, seen: Tensor) -> None:
    optimizer.forecaster.load_state_dict({"values": values, "numbers": seen.to(values)})


# ---- penalty and update ----------------------------------------------------------------------------------------------


def huber(z: Tensor, c: Tensor) -> Tensor:
    return F.smooth_l1_loss(z, c)


DISTANCES = [*distances.DISTANCES, huber]
FUNCTIONS = {name: getattr(distances, name) for name in distances.DISTANCES} | {huber: huber}


def check_against_the_reference(distance: Any, **options: Any) -> None:
    model, theirs = network(), network()
    optimizer = wrap(model, **{"weight": 0.7, "alpha": 0.4, "distance": distance} | options)
    plain, known = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), {}
    function, alpha = FUNCTIONS[distance], options.get("alpha", 0.4)
    numbers = None if options.get("update") == "batch" else {}
    for x, y in batches(30):
        train(model, optimizer, [(x, y)])
        dcp_step(
            *(theirs, known, plain, x, y, F.cross_entropy, function),
            weight=0.7, alpha=alpha, numbers=numbers,
        )  # fmt: skip
        assert optimizer.forecaster.seen.nonzero().flatten().tolist() == sorted(known)
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.prototypes, torch.stack([known[k] for k in range(CLASSES)]), **CLOSE)


@pytest.mark.parametrize("distance", DISTANCES)
def test_thirty_steps_equal_the_reference(distance):
    check_against_the_reference(distance)


def test_equation_6_to_the_letter_too():
    check_against_the_reference("squared", update="batch")


@pytest.mark.parametrize("update", ["rows", "batch"])
@pytest.mark.parametrize("distance", ["mse", "kl"])
def test_also_where_it_may_never_be_read_that_all_classes_are_known(distance, update, monkeypatch):
    """As on a device, between the steps in which it is waited for."""
    monkeypatch.setattr(_sync, "may_sync", lambda step, tensor: False)
    check_against_the_reference(distance, update=update)


@pytest.mark.parametrize("update", ["rows", "batch"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_at_the_ends_of_alpha_too(alpha, update):
    """Prototypes that are the last means, or those of all rows alike or the first ones for good."""
    check_against_the_reference("mse", alpha=alpha, update=update)


@pytest.mark.parametrize("parts", [(20, 30, 10), (3, 4, 2), (1,) * 30], ids=str)
def test_several_forwards_before_a_step_count_as_one(parts):
    """Whether they have more rows than there are classes or fewer."""
    model, expected, numbers = network(), {}, dict.fromkeys(range(CLASSES), 0.0)
    optimizer = wrap(model, alpha=0.3)
    for x, y in batches(6, size=sum(parts)):
        z = model(x).detach()
        optimizer.zero_grad()
        for rows in torch.arange(len(x)).split(parts):
            (F.cross_entropy(model(x[rows]), y[rows]) / len(parts)).backward()
        optimizer.step()
        for k in y.unique().tolist():
            numbers[k], before = 0.3 * numbers[k] + int((y == k).sum()), expected.get(k, 0.0)
            expected[k] = before + (z[y == k] - before).sum(0) / numbers[k]
        for k, prototype in expected.items():
            assert_same(optimizer.prototypes[k], prototype, **CLOSE)


@pytest.mark.usefixtures("older_objects")
def test_memory_does_not_grow_with_the_forwards_before_a_step():
    model = network()
    optimizer = wrap(model)
    train(model, optimizer, batches(2))
    elements = []
    for x, y in batches(40):
        F.cross_entropy(model(x), y).backward()
        gc.collect()
        elements.append(live_tensors()[1])
    assert max(elements[20:]) <= max(elements[:20])


def test_a_step_that_is_forgotten_leaves_nothing():
    results = []
    for with_skipped in (False, True):
        model = network()
        optimizer = wrap(model)
        train(model, optimizer, batches(4))
        if with_skipped:
            F.cross_entropy(model(torch.randn(9, FEATURES).double()), torch.full((9,), CLASSES - 1)).backward()
            optimizer.zero_grad()
        train(model, optimizer, batches(2, seed=3))
        results.append((model.state_dict(), optimizer.prototypes, optimizer.forecaster.seen))
    assert_same(*results)
    assert not results[0][2].all()


def test_labels_may_be_written_over_before_the_step():
    model = Logits()
    optimizer, labels = wrap(model, lr=0.0), torch.tensor([3, 5])
    z = torch.randn(2, CLASSES).double()
    optimizer.set_targets(labels)
    model(z).sum().backward()
    labels.fill_(0)  # a buffer that the script refills
    optimizer.step()
    assert_same(optimizer.prototypes[[3, 5]], z)
    assert optimizer.forecaster.seen.nonzero().flatten().tolist() == [3, 5]


def test_weight_zero_leaves_the_training_untouched_and_still_learns():
    model, plain = network(), network()
    optimizer = wrap(model, weight=0.0)
    train(model, optimizer, batches(10))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), batches(10))
    assert_same(model, plain)
    assert optimizer.forecaster.seen.any()


# ---- ignored rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignored", "options"),
    [
        (-100, {}),
        (3, {}),
        (77, {"distance": "l1"}),
        (-100, {"distance": "kl"}),
        (-100, {"distance": "infonce"}),
        (3, {"ignore_index": 3}),
    ],
    ids=str,
)
def test_rows_that_the_loss_ignores_count_for_nothing(ignored, options):
    results = []
    for padding in (0, 3):
        model, criterion = network(), nn.CrossEntropyLoss(ignore_index=ignored)
        optimizer, penalties = wrap(model, **options), []
        for x, y in batches(8):
            x, y = (
                torch.cat([x, 9 * x[:padding]]),
                torch.cat([y.where(y != ignored, 5), y.new_full((padding,), ignored)]),
            )
            train(model, optimizer, [(x, y)], criterion)
            penalties.append(optimizer.penalty)
        results.append((model.state_dict(), optimizer.prototypes, optimizer.forecaster.seen, torch.tensor(penalties)))
    assert_same(*results, **CLOSE)
    assert results[0][3][-1] > 0


@pytest.mark.parametrize("given", [False, True])
def test_rows_that_ignore_index_names_count_for_nothing_though_the_loss_does_not_ignore_them(given):
    """Their own share of the loss stays; a batch of them alone has no penalty."""
    model, plain = network(), network()
    optimizer = wrap(model, ignore_index=2, weight=0.5)
    for step, (x, y) in enumerate(batches(4)):
        y = y.fill_(2) if step == 1 else y
        plain.load_state_dict(model.state_dict())
        z, before = plain(x), optimizer.prototypes
        (expected,) = torch.autograd.grad(F.cross_entropy(z, y), plain[2].bias)
        known = (y != 2) & optimizer.forecaster.seen[y]
        pull = torch.where(known[:, None], 2 / CLASSES * (z.detach() - before[y]), 0.0).sum(0)
        optimizer.zero_grad()
        if given:
            optimizer.set_targets(y)
        F.cross_entropy(model(x), y).backward()
        assert_same(model[2].bias.grad, expected + 0.5 * pull / max(int((y != 2).sum()), 1), **CLOSE)
        optimizer.step()
    assert not optimizer.forecaster.seen[2]
    assert known.any()


@pytest.mark.parametrize("distance", ["mse", "infonce"])
def test_a_batch_whose_given_labels_are_all_ignored(distance):
    model = network()
    optimizer = wrap(model, distance=distance, ignore_index=-1)
    step_on(model, optimizer, torch.randn(4, FEATURES).double(), torch.full((4,), -1))
    assert optimizer.penalty == 0.0
    assert not optimizer.forecaster.seen.any()


def test_ignored_rows_that_are_not_numbers_leave_no_trace():
    model = Logits()
    optimizer = wrap(model, lr=0.0)
    z = torch.zeros(3, CLASSES, dtype=torch.float64).index_fill_(0, torch.tensor([1]), INF)
    for _ in range(2):
        step_on(model, optimizer, z, torch.tensor([0, -100, 2]))
    assert torch.equal(optimizer.prototypes, torch.zeros(CLASSES, CLASSES, dtype=torch.float64))


# ---- soft labels -----------------------------------------------------------------------------------------------------


def mixtures(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mixup of two labels a row: few columns have a share, and other ones in each batch."""
    for (x, y), (_, other) in zip(batches(steps), batches(steps, seed=9), strict=True):
        yield x, 0.75 * one_hot(y) + 0.25 * one_hot(other)


@pytest.mark.parametrize(("distance", "reads"), [("mse", True), ("kl", True), ("mse", False)])
def test_soft_labels_by_the_formula(distance, reads, monkeypatch):
    """Where values may not be read, over the columns of all classes."""
    monkeypatch.setattr(_sync, "may_sync", lambda step, tensor: reads)
    model, theirs = network(), network()
    optimizer, plain = wrap(model, distance=distance), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    function = FUNCTIONS[distance]
    values, numbers = torch.zeros(CLASSES, CLASSES, dtype=torch.float64), torch.zeros(CLASSES, dtype=torch.float64)
    for x, shares in mixtures(30):
        optimizer.zero_grad()
        optimizer.set_targets(shares)
        F.cross_entropy(model(x), shares).backward()
        optimizer.step()

        z, known = theirs(x), ~((shares > 0) & (numbers == 0)).any(1)
        penalty = function(z[known], (shares @ values)[known]) * known.double().mean() if known.any() else 0.0
        plain.zero_grad()
        (F.cross_entropy(z, shares) + penalty).backward()
        plain.step()
        totals = shares.sum(0)
        numbers = torch.where(totals > 0, 0.6 * numbers + totals, numbers)
        apart = shares.T @ z.detach() - totals[:, None] * values
        values = values + apart / numbers.clamp(min=1e-30)[:, None]
        assert_same(optimizer.forecaster.seen, numbers > 0)
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.prototypes, values, **CLOSE)


def test_soft_labels_by_hand():
    """t = (3/4, 1/4): the prediction is a mixture of prototypes, and each class's mean weighs the row by its share."""
    model = Logits()
    optimizer = wrap(model, lr=0.0, num_classes=2, alpha=0.5, distance="squared", update="batch")
    know(optimizer, torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([True, True]))
    z = torch.tensor([[4.0, 0.0], [8.0, 0.0]], dtype=torch.float64)
    step_on(model, optimizer, z, torch.tensor([[0.75, 0.25], [0.0, 1.0]], dtype=torch.float64))
    # predictions (1.5, 1), (0, 4): squares 6.25 + 1 + 64 + 16 over 4
    assert optimizer.penalty == pytest.approx(87.25 / 4)
    mean_1 = (0.25 * 4 + 1.0 * 8) / 1.25
    assert_same(optimizer.prototypes, torch.tensor([[3.0, 0.0], [mean_1 / 2, 2.0]], dtype=torch.float64), atol=1e-12)


def test_soft_labels_with_an_unseen_class_give_no_penalty():
    model = Logits()
    optimizer = wrap(model, lr=0.0, num_classes=3, distance="squared")
    know(optimizer, torch.zeros(3, 3), torch.tensor([True, False, False]))
    labels = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    step_on(model, optimizer, torch.tensor([[5.0, 6.0, 7.0], [1.0, 2.0, 3.0]], dtype=torch.float64), labels)
    assert optimizer.penalty == pytest.approx((1 + 4 + 9) / 3 / 2)


def test_soft_labels_reduce_to_hard_ones():
    results = []
    for soft in (False, True):
        model = network()
        optimizer = wrap(model)
        for x, y in batches(10):
            optimizer.zero_grad()
            optimizer.set_targets(one_hot(y) if soft else y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append((model.state_dict(), optimizer.prototypes))
    assert_same(*results, **CLOSE)


@pytest.mark.parametrize("as_two_losses", [False, True])
def test_mixed_labels_that_are_read_are_those_that_are_given(as_two_losses):
    results = []
    for given in (False, True):
        model = network()
        optimizer = wrap(model)
        for (x, y), (_, other) in zip(batches(10), batches(10, seed=9), strict=True):
            shares = 0.75 * one_hot(y) + 0.25 * one_hot(other)
            optimizer.zero_grad()
            if given:
                optimizer.set_targets(shares)
            z = model(x)
            if as_two_losses:
                loss = 0.75 * F.cross_entropy(z, y) + 0.25 * F.cross_entropy(z, other)
            else:
                loss = F.cross_entropy(z, shares)
            (2.0 * loss).backward()
            assert optimizer.logs()["loss_scale"] == pytest.approx(2.0)
            optimizer.step()
        results.append((model.state_dict(), optimizer.prototypes))
    assert_same(*results, rtol=1e-8, atol=1e-9)


def test_hard_and_soft_labels_may_alternate_within_a_step():
    model = network()
    optimizer = wrap(model)
    ((x, y),) = batches(1)
    for labels in (y, one_hot(y)):
        optimizer.set_targets(labels)
        F.cross_entropy(model(x), labels).backward()
    z = model(x).detach()
    optimizer.step()
    for k in y.unique():
        assert_same(optimizer.prototypes[k], z[y == k].mean(0), **CLOSE)


# ---- labels to rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.tensor([0, 1, 12]), ValueError, r"targets has label 12; labels must lie in 0..11 or equal ignore_index"),
        (torch.tensor([0, -1, 2]), ValueError, r"targets has label -1"),
        (torch.tensor([0, 1]), ValueError, r"targets has 2 labels for 3 rows"),
        (torch.tensor([0.5, 1.0, 2.0]), TypeError, r"neither class indices nor soft labels.*\(3, 12\)"),
        (torch.tensor([True, False, True]), TypeError, r"dtype torch.bool"),
        ([0, 1, 2], TypeError, r"targets must be a tensor of labels, got list"),
    ],
)
def test_labels_that_do_not_fit_are_refused_before_anything_changes(labels, error, message):
    model = network()
    optimizer = wrap(model, targets=lambda args, kwargs: labels)
    before = copy.deepcopy(optimizer.state_dict()[KEY])
    z = model(torch.randn(3, FEATURES).double())
    with pytest.raises(error, match=message):
        z.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert_same(optimizer.state_dict()[KEY], before)


def test_a_width_of_logits_that_changes_is_refused_as_other_than_the_first_batchs():
    model, wider = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 6)
    called = nn.ModuleList([model, wider])
    called.forward = lambda x, of: called[of](x)
    optimizer = DCPOptimizer(torch.optim.SGD(called.parameters(), lr=0.1), called)
    x, y = torch.randn(8, FEATURES), torch.arange(8) % 4
    F.cross_entropy(called(x, 0), y).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"^the first batch had 4 logits a row, this one has 6: wrap the model again"):
        F.cross_entropy(called(x, 1), y).backward()


def test_logits_of_another_width_are_refused():
    model = network()
    optimizer = wrap(model, num_classes=7)
    optimizer.set_targets(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"num_classes=7 but the model gives 12 logits; pass num_classes=12"):
        model(torch.randn(1, FEATURES).double()).sum().backward()
    del optimizer


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("class_dim", [None, 1, -1])
def test_labels_of_dense_logits(class_dim, read):
    """Where they are given, the class dimension is not read; None is then 1."""
    model = nn.Conv2d(1, 5, 1).double()
    last = nn.Sequential(model, nn.Flatten(2), nn.Unflatten(2, (3, 4)))
    net = nn.Sequential(last, Permuted()) if class_dim == -1 else last
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    optimizer = wrap(net, num_classes=5, class_dim=class_dim, ignore_index=255)
    x, y = torch.randn(2, 1, 3, 4).double(), torch.randint(4, (2, 3, 4))
    y[0, 0, 0] = 255
    z = model(x).detach()
    if not read:
        optimizer.set_targets(y)
    logits = net(x)
    criterion(logits.movedim(-1, 1) if class_dim == -1 else logits, y).backward()
    optimizer.step()
    for k in range(5):
        rows = z.movedim(1, -1)[y == k]
        expected = rows.mean(0) if len(rows) else torch.zeros(5, dtype=torch.float64)
        assert_same(optimizer.prototypes[k], expected, atol=1e-12)


class Permuted(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.movedim(1, -1)


def laid_out(targets: Tensor, shape: tuple[int, ...], class_dim: int = 1, ignore_index: int = -100) -> Tensor:
    forward = Forward(torch.zeros(shape), 1)
    z = to_rows(forward.logits, class_dim)
    return prototypes.to_labels(targets, forward, z, class_dim, z.shape[1], ignore_index, look=True)


def test_hard_labels_become_one_for_each_row_and_k_where_ignored():
    y = torch.tensor([[[0, 2], [1, -100]]], dtype=torch.int32)
    assert laid_out(y, (1, 3, 2, 2)).tolist() == [0, 2, 1, 3]
    assert laid_out(torch.tensor([0, 2, 1]), (3, 3), ignore_index=2).tolist() == [0, 3, 1]


def test_a_dense_map_of_soft_labels_is_looked_at_along_its_classes():
    soft = torch.softmax(torch.randn(2, 3, 4, 4), 1)
    assert_same(laid_out(soft, (2, 3, 4, 4)), to_rows(soft))
    with pytest.raises(ValueError, match="not distributions over 4 classes"):
        laid_out(soft, (2, 3, 4, 4), class_dim=-1)


def standardized(classes: int) -> Tensor:
    targets = torch.randn(ROWS, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (targets - targets.mean(0)) / targets.std(0)


REFUSED = {
    "binary, one logit": (nn.BCEWithLogitsLoss, (torch.arange(ROWS) % 2)[:, None].double()),
    "multi-label": (nn.BCEWithLogitsLoss, (torch.arange(ROWS * 5) % 3 == 0).double().reshape(ROWS, 5)),
    "one label or none": (nn.BCEWithLogitsLoss, torch.eye(ROWS, 5, dtype=torch.float64)),
    "regression": (nn.MSELoss, standardized(3)),
    "log-probabilities": (partial(nn.KLDivLoss, log_target=True, reduction="sum"), F.log_softmax(standardized(4), 1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_are_no_distributions_are_refused_before_anything_changes(case):
    criterion, targets = REFUSED[case][0](), REFUSED[case][1]
    model = nn.Linear(FEATURES, targets.shape[1]).double()
    optimizer = wrap(model, num_classes=targets.shape[1])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()[KEY]))
    for _ in range(2):  # each time, not the first one only
        optimizer.set_targets(targets)
        loss = criterion(model(torch.randn(ROWS, FEATURES).double()), targets)
        with pytest.raises(ValueError, match=r"(?s)targets has soft labels that are not distributions.*DCLOptimizer"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert_same((model.state_dict(), optimizer.state_dict()[KEY]), before)


ACCEPTED = {
    "mixup": lambda y: 0.7 * one_hot(y, 5) + 0.3 * one_hot(y.flip(0), 5),
    "CutMix's share of an image in bfloat16": lambda y: (
        0.92 * one_hot(y, 5) + 0.08 * one_hot(y.flip(0), 5)
    ).bfloat16(),
    "label smoothing": lambda y: 0.9 * one_hot(y, 5) + 0.1 / 5,
    "a teacher's probabilities in float16": lambda y: torch.softmax(one_hot(y, 5), 1).half(),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_distributions_are_accepted(kind):
    soft = ACCEPTED[kind](torch.arange(ROWS) % 5)
    assert laid_out(soft, (ROWS, 5)).data_ptr() == soft.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 1000, 20_000])
def test_what_rounding_leaves_of_smoothed_labels_is_a_distribution(classes, dtype):
    soft = 0.9 * one_hot(torch.arange(8) % classes, classes) + 0.1 / classes
    soft[:, -1] -= 1e-5  # a rest that was subtracted and rounded
    assert laid_out(soft.to(dtype), (8, classes)).shape == (8, classes)


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(values: Any, seen: Any = None) -> tuple[float, float]:
    """The norm and the margin that ``logs`` has for these prototypes."""
    values = torch.tensor(values, dtype=torch.float64)
    seen = torch.ones(len(values), dtype=torch.bool) if seen is None else torch.tensor(seen)
    optimizer = wrap(network(), num_classes=len(values))
    know(optimizer, values, seen)
    logs = optimizer.logs()
    return logs["prototype_norm"], logs["prototype_margin"]


def test_norm_and_margin_by_hand():
    norm, margin = figures([[3.0, 4.0, 0.0], [1.0, 7.0, 3.0], [0.0, 0.0, -6.0]])
    assert norm == pytest.approx((5 + math.sqrt(59) + 6) / 3)
    assert margin == pytest.approx(math.sqrt((1.0**2 + 5.0**2 + 6.0**2) / 3))


def test_what_all_logits_of_a_prototype_have_in_common_counts_for_nothing_in_the_margin():
    assert figures([[1002.0, 1000.0], [1000.0, 1002.0]])[1] == pytest.approx(2.0)


def test_classes_not_seen_count_for_nothing():
    norm, margin = figures([[4.0, 1.0, 1.0, 1.0], [0.0] * 4, [0.0, 0.0, 2.0, 0.0], [0.0] * 4], [1, 0, 1, 0])
    assert norm == pytest.approx((math.sqrt(19) + 2) / 2)
    assert margin == pytest.approx(math.sqrt((3.0**2 + 2.0**2) / 2))


def test_of_one_class_the_margin_is_its_logit():
    assert figures([[3.0]]) == (3.0, 3.0)


def test_before_the_first_step_they_are_not_known():
    for classes in (None, 4):
        logs = wrap(network(), num_classes=classes).logs()
        assert math.isnan(logs["prototype_norm"])
        assert math.isnan(logs["prototype_margin"])


def test_masked_classes_have_no_part_in_them():
    model = Logits()
    optimizer = wrap(model, lr=0.0, num_classes=3)
    step_on(model, optimizer, torch.tensor([[1.0, -1.0, -INF], [-1.0, 1.0, -INF]]).double(), torch.arange(2))
    logs = optimizer.logs()
    assert logs["prototype_norm"] == pytest.approx(math.sqrt(2))
    assert 1 < logs["prototype_margin"] < 3


def growing_margin(**options: Any) -> float:
    """Where batch norm ties a class's logits to the number of its rows in the batch: few rows stand out more."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, weight=0.3, **options)
    y = torch.arange(300) % 10
    x = torch.randn(10, 16)[y] + 0.5 * torch.randn(300, 16)
    rows = torch.randint(300, (500, 30))
    train(model, optimizer, [(x[index], y[index]) for index in rows])
    return optimizer.logs()["prototype_margin"]


def test_a_margin_beyond_twenty_tells_prototypes_that_run_away():
    assert growing_margin(alpha=0.0) > 20
    assert growing_margin() < 20


# ---- scores of the rows of a batch against each other ----------------------------------------------------------------


class Retrieval(nn.Module):
    """As CLIP: row i of the scores is x's row i against each row of w."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        w = x + 0.1 * x.roll(1, 1)
        return self.scale * F.normalize(self.first(x), dim=1) @ F.normalize(self.second(w), dim=1).T


def train_in_batch(sizes: list[int], scale: float = 1.0, **options: Any) -> DCPOptimizer:
    model, generator = Retrieval(scale), torch.Generator().manual_seed(0)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    train(model, optimizer, [(torch.randn(n, FEATURES, generator=generator), torch.arange(n)) for n in sizes])
    return optimizer


@pytest.mark.parametrize("sizes", [[8] * 16, [8, 8, 8, 5]], ids=["equal batches", "a smaller last one"])
@pytest.mark.parametrize("reads", [True, False], ids=["values are read", "only in steps 1, 2, 4, 8, 16"])
def test_negatives_in_the_batch_are_refused_with_the_reason(sizes, reads, monkeypatch):
    if not reads:
        monkeypatch.setattr(_sync, "may_sync", lambda step, tensor: _sync.is_sync_step(step))
    with pytest.raises(ValueError, match=r"(?s)scores against the rows of a batch.*in-batch negatives.*DCLOptimizer"):
        train_in_batch(sizes)
    train_in_batch(sizes[:-1])  # which no earlier step has shown


@pytest.mark.parametrize("scale", [5.0, 14.0, 50.0])
def test_negatives_in_the_batch_are_refused_at_clips_temperature(scale):
    """The labels are read as soft ones then, and rows of which the model is certain may have none."""
    with pytest.raises(ValueError, match="in-batch negatives"):
        train_in_batch([32] * 16, scale)


def test_negatives_in_a_queue_are_refused_with_the_reason():
    """As in MoCo: the first logit of a row is that of the other view, the others are those of the queue."""
    model = network()
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=r"(?s)were 0 for all rows.*MoCo.*DCLOptimizer"):
        train(model, optimizer, [(x, torch.zeros_like(y)) for x, y in batches(16)])
    assert optimizer.logs()["step"] == 15


def places(number: int) -> list[Tensor]:
    """Labels of 20 batches, each of as many rows as there are classes, whose places most are."""
    labels = torch.arange(number).repeat(20, 1)
    labels[10, :2] = labels[10, :2].flip(0)
    return list(labels)


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (places(CLASSES), {}),
        ([torch.arange(CLASSES)] * 20, {"num_classes": CLASSES}),
        ([torch.zeros(4).long()] * 20, {"num_classes": CLASSES}),
        ([torch.zeros(4).long()] * 15 + [torch.arange(4)] * 5, {}),
        ([torch.arange(CLASSES - 1)] * 20, {}),
        ([torch.arange(CLASSES + 1) % CLASSES] * 20, {}),
        ([torch.arange(CLASSES).flip(0)] * 20, {}),
    ],
    ids=[
        "one batch in another order",
        "classes by the script's word",
        "one class by its word",
        "one class first",
        "fewer rows",
        "more rows",
        "another order",
    ],
)
def test_a_small_batch_whose_labels_happen_to_be_its_rows_is_not(labels, options):
    model = network()
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    train(model, optimizer, [(x[: len(y)], y) for (x, _), y in zip(batches(20, CLASSES + 1), labels, strict=True)])
    assert optimizer.logs()["step"] == 20


def test_two_classes_in_batches_of_two_are_never_taken_for_scores():
    """Of labels at random one batch in four has them in order."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 2)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, [(torch.randn(2, FEATURES), torch.arange(2)) for _ in range(20)])
    assert optimizer.logs()["step"] == 20


def test_a_resumed_run_whose_first_batches_are_in_order_is_not_refused():
    """What came before is not known: a single batch would decide."""
    model = network()
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, batches(15))
    second = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, second, [(x, torch.arange(CLASSES)) for x, _ in batches(3, CLASSES)])
    assert second.logs()["step"] == 18


# ---- what users read -------------------------------------------------------------------------------------------------


def trained(steps: int = 5) -> tuple[nn.Module, DCPOptimizer]:
    model = network()
    optimizer = wrap(model)
    train(model, optimizer, batches(steps))
    return model, optimizer


def test_prototypes_are_a_copy():
    model, optimizer = trained()
    held = optimizer.prototypes
    assert held.shape == (CLASSES, CLASSES)
    assert optimizer.forecaster.seen[[3, 11, 0]].tolist() == [True, False, True]
    assert held[3].any()
    assert not held[11].any()
    before = held.clone()
    train(model, optimizer, batches(3, seed=2))
    assert_same(held, before)
    assert not torch.equal(optimizer.prototypes, held)


@pytest.mark.parametrize(
    ("classes", "dtype", "size"),
    [
        (16_385, torch.float32, "1.0 GiB"),
        (16_385, torch.bfloat16, "1.0 GiB"),  # whose prototypes are float32
        (11_586, torch.float64, "1.0 GiB"),
        (100_000, torch.float32, "37.3 GiB"),
    ],
)
def test_so_many_classes_that_their_prototypes_would_take_more_than_a_gibibyte_are_refused(classes, dtype, size):
    model = nn.Linear(1, 1).to(dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"num_classes={classes}.*would need {size}.*use DCLOptimizer"):
        DCPOptimizer(base, model, classes)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("classes", "dtype"), [(16_384, torch.float32), (11_585, torch.float64)])
def test_prototypes_of_up_to_a_gibibyte_are_not(classes, dtype):
    """On a device without memory."""
    model = nn.Linear(1, 1, device="meta", dtype=dtype)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, classes)
    assert optimizer.prototypes.shape == (classes, classes)


# ---- states and copies -----------------------------------------------------------------------------------------------


def test_a_state_that_is_held_does_not_change():
    model, optimizer = trained()
    held = optimizer.state_dict()[KEY]
    before, seen = copy.deepcopy(held), optimizer.forecaster.seen.sum()
    train(model, optimizer, batches(9, seed=2))
    assert optimizer.forecaster.seen.sum() > seen
    assert_same(held, before)


def test_a_loaded_state_is_not_written_to():
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state[KEY])
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(3, seed=2))
    assert_same(state[KEY], before)


@pytest.mark.parametrize("way", ["state", "deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(way):
    model, optimizer = trained()
    if way == "state":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = network(seed=4)
        second = wrap(again)
        again.load_state_dict(model.state_dict())
        second.load_state_dict(torch.load(file, weights_only=True))
    elif way == "deepcopy":
        again, second = copy.deepcopy((model, optimizer))
    else:
        again, second = pickle.loads(pickle.dumps((model, optimizer)))
    for net, wrapped in ((model, optimizer), (again, second)):
        train(net, wrapped, batches(6, seed=2))
    assert_same(model, again)
    assert_same(optimizer.prototypes, second.prototypes)


def test_a_copy_between_backward_and_step_has_no_gradients_and_does_not_learn():
    model, optimizer = trained()
    ((x, y),) = batches(1, seed=6)
    F.cross_entropy(model(x), y).backward()
    _, second = copy.deepcopy((model, optimizer))  # torch copies parameters without their gradients
    for wrapped in (optimizer, second):
        wrapped.step()
    assert_same(second.prototypes, trained()[1].prototypes)
    assert not torch.equal(optimizer.prototypes, second.prototypes)


def test_an_earlier_state_takes_back_what_came_after_it():
    model, optimizer = trained(2)
    state, before = copy.deepcopy(optimizer.state_dict()), optimizer.prototypes
    train(model, optimizer, batches(9, seed=2))
    assert optimizer.forecaster.seen.sum() > 8
    optimizer.load_state_dict(state)
    assert_same(optimizer.prototypes, before)
    assert optimizer.forecaster.seen.sum() == 5
    train(model, optimizer, batches(1, seed=2))
    assert optimizer.forecaster.seen.sum() < 8


def test_a_batch_whose_step_never_came_is_dropped_by_loading_a_state():
    results = []
    for with_batch in (False, True):
        model, optimizer = trained(2)
        state = copy.deepcopy(optimizer.state_dict())
        if with_batch:
            ((x, y),) = batches(1, seed=6)
            F.cross_entropy(model(x), y).backward()
        optimizer.load_state_dict(state)
        train(model, optimizer, batches(1, seed=2))
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


def test_a_state_holds_all_prototypes_and_which_classes_were_seen():
    _, optimizer = trained(2)
    state = optimizer.state_dict()[KEY]["forecaster"]
    assert state.keys() == {"values", "numbers"}
    assert_same(state["values"], optimizer.prototypes)
    assert state["numbers"].round().nonzero().flatten().tolist() == sorted({int(k) for _, y in batches(2) for k in y})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state of the prototypes does not fit: missing \['numbers', 'values'\]"),
        ({"values": torch.zeros(3, 3), "numbers": torch.zeros(3)}, r"shape \(3, 3\) for 'values', expected \(12, 12\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state, message):
    _, optimizer = trained()
    whole = optimizer.state_dict()
    before = copy.deepcopy(whole[KEY])
    whole[KEY] = whole[KEY] | {"forecaster": state}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(whole)
    assert_same(optimizer.state_dict()[KEY], before)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")
def test_distributed_checkpoints_load_into_a_fresh_optimizer(tmp_path):
    model, optimizer = trained()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    again = network(seed=3)
    second = wrap(again)
    states = dict(zip(("model", "optimizer"), get_state_dict(again, second), strict=True))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(again, second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert_same(second.prototypes, optimizer.prototypes)
    assert_same(second.forecaster.seen, optimizer.forecaster.seen)


def test_a_model_that_is_widened_between_backward_and_step():
    results = []
    for widened in (True, False):
        model = network(dtype=torch.float32 if widened else torch.float64)
        optimizer = wrap(model)
        (x, y), (x_2, y_2) = batches(2)
        train(model, optimizer, [(x.to(model[0].weight.dtype), y)])
        F.cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
        model.double()
        F.cross_entropy(model(x_2), y_2).backward()
        optimizer.step()
        results.append(optimizer.prototypes)
        assert optimizer.prototypes.dtype == torch.float64
    assert_same(*results, rtol=1e-5, atol=1e-6)


# ---- many classes ----------------------------------------------------------------------------------------------------


class NoPassOverAll(TorchDispatchMode):
    """Refuses operations on tensors of a size or more, but for reading, adding to and setting some of their rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        rows_only = function.is_view or function.overloadpacket.__name__.startswith("index")
        whole = [] if rows_only else [args, kwargs]
        if function.overloadpacket.__name__ not in ("index_add_", "index_copy_", "index_put_"):
            whole.append(() if function.is_view else result)
        large = [t for t in tree_leaves(whole) if isinstance(t, Tensor) and t.numel() >= self._size]
        assert not large, f"{function} on {[tuple(t.shape) for t in large]}"
        return result


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_step_passes_over_the_prototypes_of_its_own_classes_only(kind):
    classes, size = 1000, 6
    model, criterion = nn.Linear(2, classes), nn.CrossEntropyLoss(ignore_index=7 if kind == "hard" else -100)
    optimizer = wrap(model, num_classes=classes, loss_scale=1.0)
    labels = torch.randint(classes, (3, size)).index_fill_(1, torch.tensor([0]), 7)
    with NoPassOverAll(classes * classes):
        for y in labels.repeat(2, 1):
            target = (0.75 * one_hot(y, classes) + 0.25 * one_hot(y.flip(0), classes)).float() if kind == "soft" else y
            optimizer.zero_grad()
            for rows in torch.arange(size).split([4, 2]):
                if kind == "soft":
                    optimizer.set_targets(target[rows])
                criterion(model(torch.randn(len(rows), 2)), target[rows]).backward()
            optimizer.step()
    assert optimizer.forecaster.seen.sum() == 3 * (size - 1) + int(kind != "hard")
    assert optimizer.penalty > 0


# ---- two ranks -------------------------------------------------------------------------------------------------------


needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
JOINT = [(size, parts) for size in (8, 40) for parts in ("equal", "uneven")]  # fewer rows than classes, and more


def part_of(rank: int, x: Tensor, y: Tensor, parts: str) -> tuple[Tensor, Tensor]:
    """By label, so that most classes are absent on one rank; half of the batch each, or a quarter and the rest."""
    order = torch.argsort(y, stable=True)
    cut = len(y) // (2 if parts == "equal" else 4)
    rows = (order[:cut], order[cut:])[rank]
    return x[rows], y[rows]


def loss_of(parts: str) -> tuple[nn.Module, float]:
    """Uneven parts train without the penalty, whose mean within each rank weighs its rows otherwise than the batch."""
    if parts == "equal":
        return nn.CrossEntropyLoss(), 1.0
    return nn.CrossEntropyLoss(reduction="sum", ignore_index=2), 0.0


def snapshot(model: nn.Module, optimizer: DCPOptimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "own": optimizer.prototypes, "seen": optimizer.forecaster.seen}


def trained_jointly(size: int, parts: str, rank: int | None = None) -> dict[str, Any]:
    """On one rank of two, or alone."""
    model, (criterion, weight) = network(), loss_of(parts)
    called = model if rank is None else DistributedDataParallel(model)
    optimizer = wrap(model, weight=weight)
    for x, y in batches(12, size=size):
        optimizer.zero_grad()
        inputs, labels = (x, y) if rank is None else part_of(rank, x, y, parts)
        factor = 1.0 if parts == "equal" else (1.0 if rank is None else 2.0) / size  # DDP takes the mean over the ranks
        (factor * criterion(called(inputs), labels)).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def trained_in_parts(rank: int) -> dict[str, Any]:
    """One rank has its rows in two forwards, the other in one, of soft labels."""
    model = network()
    optimizer = wrap(model, lr=0.0, process_group=dist.group.WORLD)  # no DistributedDataParallel
    for x, y in batches(4):
        optimizer.zero_grad()
        inputs, labels = part_of(rank, x, y, "equal")
        for rows in torch.arange(4).split(4 if rank else 2):
            given = one_hot(labels[rows]) if rank else labels[rows]
            optimizer.set_targets(given)
            F.cross_entropy(model(inputs[rows]), given).backward()
        optimizer.step()
    return snapshot(model, optimizer)


def trained_where_one_rank_meets_nan(rank: int) -> dict[str, Any]:
    model = network(dtype=torch.float32)
    parallel = DistributedDataParallel(model)
    optimizer = wrap(model)
    for step, (x, y) in enumerate(batches(14)):
        y = torch.arange(ROWS) + 4 * (step % 2)  # all classes are known after two steps
        inputs, labels = part_of(rank, x.float(), y, "equal")
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs), labels)
        if step in (2, 6):
            (loss * (NAN if rank == 0 else 1.0)).backward()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            loss.backward()
        optimizer.step()
    return snapshot(model, optimizer)


def worker(rank: int, folder: Path) -> None:
    for case in JOINT:
        torch.save(trained_jointly(*case, rank), folder / f"{case} {rank}.pt")
    torch.save(trained_in_parts(rank), folder / f"parts {rank}.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(trained_where_one_rank_meets_nan(rank), folder / f"nan {rank}.pt")


def same_on_both(ranks: Path, name: str) -> dict[str, Any]:
    first, second = (torch.load(ranks / f"{name} {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    return first


@needs_gloo
@pytest.mark.parametrize("case", JOINT, ids=str)
def test_both_ranks_hold_the_same_bits_and_what_one_process_has_on_the_joint_batch(case, ranks: Path):
    found = same_on_both(ranks, str(case))
    assert_same(found, trained_jointly(*case), **CLOSE)
    assert found["seen"].sum() > CLASSES // 2


@needs_gloo
def test_ranks_may_differ_in_the_number_of_their_forwards_and_the_kind_of_their_labels(ranks: Path):
    model = network()
    optimizer = wrap(model, lr=0.0)
    train(model, optimizer, batches(4))
    assert_same(same_on_both(ranks, "parts"), snapshot(model, optimizer), **CLOSE)


@needs_gloo
def test_a_rank_whose_batch_is_not_finite_leaves_the_other_in_step(ranks: Path):
    found = same_on_both(ranks, "nan")
    assert found["own"].isfinite().all()
    assert found["seen"].all()
