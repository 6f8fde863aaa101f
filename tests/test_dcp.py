"""DCP: where labels come from, what they may be, and what they may not be."""

from __future__ import annotations

import copy
import math
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, TwoHeads, assert_same, batches, mlp


def wrap(model, **options):
    return DCPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        CLASSES,
        **{"weight": 1.0, "alpha": 0.6} | options,
    )


class WithLabels(nn.Module):
    """Like a Hugging Face model: labels go in, the loss comes out beside the logits."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, labels=None):
        z = self.net(x)
        return {"loss": None if labels is None else F.cross_entropy(z, labels), "logits": z}


def ways():
    """Each way to give labels: the model, the optimizer, and one training step."""
    model = mlp()
    reading = wrap(model)

    def plain_step(x, y, model=model):
        reading.zero_grad()
        F.cross_entropy(model(x), y).backward()
        reading.step()

    yield "read", model, reading, plain_step

    labelled = WithLabels()
    by_keyword = wrap(labelled, targets="labels")

    def keyword_step(x, y):
        by_keyword.zero_grad()
        labelled(x, labels=y)["loss"].backward()
        by_keyword.step()

    yield "keyword", labelled.net, by_keyword, keyword_step

    labelled_too = WithLabels()
    by_function = wrap(labelled_too, targets=lambda args, kwargs: args[1])

    def function_step(x, y):
        by_function.zero_grad()
        labelled_too(x, y)["loss"].backward()
        by_function.step()

    yield "function", labelled_too.net, by_function, function_step

    set_model = mlp()
    by_call = wrap(set_model)

    def call_step(x, y):
        by_call.zero_grad()
        by_call.set_targets(y)
        F.cross_entropy(set_model(x), y).backward()
        by_call.step()

    yield "set_targets", set_model, by_call, call_step

    closure_model = mlp()
    in_closure = wrap(closure_model)

    def closure_step(x, y):
        def closure():
            in_closure.set_targets(y)
            return F.cross_entropy(closure_model(x), y)

        in_closure.step(closure)

    yield "set_targets in a closure", closure_model, in_closure, closure_step


def test_every_way_to_give_labels_is_the_same():
    results = {}
    for name, model, optimizer, step in ways():
        for x, y in batches(10):
            step(x, y)
        results[name] = (model, optimizer.prototypes)
    for name, (model, prototypes) in results.items():
        assert_same(model, results["read"][0], rtol=1e-10, atol=1e-12)
        assert_same(prototypes, results["read"][1], rtol=1e-10, atol=1e-12)
        assert name


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.tensor([0, 1, 5]), ValueError, r"targets has label 5; labels must lie in 0..4 or equal ignore_index"),
        (torch.tensor([0, -1, 2]), ValueError, r"targets has label -1"),
        (torch.tensor([0, 1]), ValueError, r"targets has 2 labels for 3 rows"),
        (torch.tensor([0.5, 1.0, 2.0]), TypeError, r"neither class indices nor soft labels.*\(3, 5\)"),
        (torch.tensor([True, False, True]), TypeError, r"dtype torch.bool"),
        ([0, 1, 2], TypeError, r"targets must be a tensor of labels, got list"),
    ],
)
def test_bad_labels(labels, error, message):
    model = mlp()
    optimizer = wrap(model)
    before = copy.deepcopy(optimizer.state_dict()["dcl_optim.DCPOptimizer"])
    with pytest.raises(error, match=message):  # noqa: PT012
        optimizer.set_targets(labels)
        z = model(torch.randn(3, FEATURES, dtype=torch.float64))
        z.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert_same(optimizer.state_dict()["dcl_optim.DCPOptimizer"], before)


def test_ignored_rows_have_no_penalty_and_move_no_prototype():
    results = []
    for padded in (False, True):
        model, criterion = mlp(), nn.CrossEntropyLoss(ignore_index=2)
        optimizer = wrap(model)
        for x, y in batches(8):
            y = y.where(y != 2, 3)
            if padded:
                x, y = torch.cat([x, x[:5] * 9]), torch.cat([y, torch.full((5,), 2)])
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        results.append((model, optimizer))
    assert_same(results[0][0], results[1][0], rtol=1e-10, atol=1e-12)
    assert_same(results[0][1].prototypes, results[1][1].prototypes, rtol=1e-10, atol=1e-12)
    assert results[1][1].forecaster.seen.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("distance", ["mse", "infonce"])
def test_all_rows_ignored(distance):
    model = mlp()
    optimizer = wrap(model, distance=distance, ignore_index=-1)
    optimizer.set_targets(torch.full((4,), -1))
    model(torch.randn(4, FEATURES, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert optimizer.penalty == 0.0
    assert not optimizer.forecaster.seen.any()


def test_soft_labels_reduce_to_hard_ones():
    results = []
    for soft in (False, True):
        model = mlp()
        optimizer = wrap(model)
        for x, y in batches(10):
            optimizer.zero_grad()
            optimizer.set_targets(F.one_hot(y, CLASSES).double() if soft else y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append((model, optimizer.prototypes))
    assert_same(results[0][0], results[1][0], rtol=1e-10, atol=1e-12)
    assert_same(results[0][1], results[1][1], rtol=1e-10, atol=1e-12)


def test_soft_labels_by_hand():
    """t = (3/4, 1/4): the forecast is the mixture of prototypes, and each class's mean weighs the row by its share."""
    model = nn.Linear(1, 2, bias=False).double()
    model.weight.data.copy_(torch.tensor([[4.0], [0.0]]))
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, 2, alpha=0.5, weight=1.0)
    known = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    optimizer.forecaster.load_state_dict({"values": known, "seen": torch.tensor([True, True])})
    optimizer.set_targets(torch.tensor([[0.75, 0.25], [0.0, 1.0]], dtype=torch.float64))
    model(torch.tensor([[1.0], [2.0]], dtype=torch.float64)).sum().backward()
    # z = (4, 0), (8, 0); forecasts (1.5, 1), (0, 4): squares 6.25 + 1 + 64 + 16 over 4
    assert optimizer.penalty == pytest.approx(87.25 / 4)
    optimizer.step()
    mean_1 = (0.25 * 4 + 1.0 * 8) / 1.25
    assert_same(optimizer.prototypes, torch.tensor([[3.0, 0.0], [mean_1 / 2, 2.0]], dtype=torch.float64), atol=1e-12)


def test_soft_labels_with_an_unseen_class_give_no_penalty():
    model = mlp()
    optimizer = wrap(model)
    known = {"values": torch.zeros(5, 5).double(), "seen": torch.arange(5) == 0}
    optimizer.forecaster.load_state_dict(known)
    optimizer.set_targets(torch.tensor([[0.5, 0.5, 0, 0, 0], [1.0, 0, 0, 0, 0]], dtype=torch.float64))
    z = model(torch.randn(2, FEATURES, dtype=torch.float64))
    z.sum().backward()
    assert optimizer.penalty == pytest.approx(z[1].square().sum().item() / 10)


def test_soft_labels_have_no_class_to_average_within():
    model = mlp()
    optimizer = wrap(model, reduction="per_class")
    optimizer.set_targets(torch.full((2, CLASSES), 0.2, dtype=torch.float64))
    with pytest.raises(TypeError, match="reduction='per_class' needs hard labels"):
        model(torch.randn(2, FEATURES, dtype=torch.float64)).sum().backward()
    del optimizer


def test_labels_given_twice_are_refused():
    x, y = next(iter(batches(1)))
    labelled = WithLabels()
    optimizer = wrap(labelled, targets="labels")
    optimizer.set_targets(y)
    with pytest.raises(RuntimeError, match="labels twice, from targets= and from set_targets"):
        labelled(x, labels=y)


def test_mixup_as_a_sum_of_two_losses_with_soft_labels_given():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = wrap(model, loss_scale=2.0)
    x, y = next(iter(batches(1)))
    mixed, other = 0.7 * x + 0.3 * x.flip(0), y.flip(0)
    soft = 0.7 * F.one_hot(y, CLASSES) + 0.3 * F.one_hot(other, CLASSES)
    optimizer.set_targets(soft.double())
    z = model(mixed)
    (2.0 * (0.7 * criterion(z, y) + 0.3 * criterion(z, other))).backward()
    optimizer.step()
    assert optimizer.logs()["loss_scale"] == pytest.approx(2.0)
    expected = (soft.double().T @ z.detach()) / soft.double().sum(0)[:, None]
    assert_same(optimizer.prototypes, expected, atol=1e-12)


def test_dense_labels():
    torch.manual_seed(0)
    model = nn.Conv2d(1, CLASSES, 1).double()
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, CLASSES, weight=1.0, alpha=0.6)
    x, y = torch.randn(2, 1, 3, 3, dtype=torch.float64), torch.randint(CLASSES, (2, 3, 3))
    y[0, 0, 0] = 255
    z = model(x).detach()
    criterion(model(x), y).backward()
    optimizer.step()
    for k in range(CLASSES):
        rows = z.movedim(1, -1)[y == k]
        expected = rows.mean(0) if len(rows) else torch.zeros(CLASSES, dtype=torch.float64)
        assert_same(optimizer.prototypes[k], expected, atol=1e-12)


def test_keyword_that_is_missing():
    model = WithLabels()
    optimizer = wrap(model, targets="labels")
    with pytest.raises(ValueError, match=r"targets='labels': the model was called without that keyword"):
        model(torch.randn(2, FEATURES, dtype=torch.float64))
    model.eval()
    model(torch.randn(2, FEATURES, dtype=torch.float64))  # evaluation needs no labels
    del optimizer


def test_step_takes_no_labels():
    model = mlp()
    optimizer = wrap(model)
    x, y = next(iter(batches(1)))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(TypeError, match="targets"):
        optimizer.step(lambda: F.cross_entropy(model(x), y), targets=y)
    assert_same((model.state_dict(), optimizer.state_dict()), before)


def test_labels_set_in_a_closure_that_is_evaluated_several_times():
    """The line search of LBFGS evaluates it at other weights, and each evaluation needs the labels."""

    def trained(by):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        base = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        optimizer = DCPOptimizer(base, model, CLASSES, weight=1.0, alpha=0.6, loss_scale=1.0)
        evaluations = []

        def closure(x, y):
            evaluations.append(x)
            optimizer.zero_grad()
            if by == "set_targets":
                optimizer.set_targets(y)
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        for x, y in batches(3):
            optimizer.step(lambda: closure(x, y))  # noqa: B023
        assert len(evaluations) > 6
        return model.state_dict(), optimizer.prototypes

    assert_same(trained("set_targets"), trained("read"))


def test_wrong_number_of_classes():
    model = mlp()
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 7, weight=1.0, alpha=0.6)
    optimizer.set_targets(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"num_classes=7 but the model gives 5 logits"):
        model(torch.randn(1, FEATURES, dtype=torch.float64)).sum().backward()
    del optimizer


@pytest.mark.parametrize("auxiliary_first", [False, True])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_an_auxiliary_head_is_not_taken_for_the_logits(variant, auxiliary_first):
    model, criterion = TwoHeads(), nn.CrossEntropyLoss()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    if variant == "dcl":
        optimizer = DCLOptimizer(base, model, weight=1.0, logits=itemgetter(0))
    else:
        options = {"weight": 1.0, "alpha": 0.6, "logits": itemgetter(0)}
        optimizer = DCPOptimizer(base, model, CLASSES, **options)
    x, y = next(iter(batches(1)))
    main, side = model(x)
    calls = [lambda: criterion(main, y), lambda: 0.4 * criterion(side, y.flip(0))]
    losses = [call() for call in (reversed(calls) if auxiliary_first else calls)]
    sum(losses).backward()
    assert optimizer.logs()["loss_scale"] == 1.0
    if variant == "dcp":
        optimizer.step()
        assert_same(optimizer.prototypes[0], main.detach()[y == 0].mean(0), atol=1e-12)


def test_a_loss_of_a_converted_copy_of_the_logits():
    model, criterion = mlp(dtype=torch.float32), nn.CrossEntropyLoss()
    optimizer = wrap(model)
    x, y = next(iter(batches(1, dtype=torch.float32)))
    (3.0 * criterion(model(x).double(), y)).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(3.0)


def test_logs_give_the_mean_length_of_the_prototypes_that_were_seen():
    model = mlp()
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert math.isnan(optimizer.logs()["prototype_norm"])
    x, y = next(batches(1))
    F.cross_entropy(model(x), torch.ones_like(y)).backward()
    optimizer.step()
    assert optimizer.logs()["prototype_norm"] == pytest.approx(optimizer.prototypes[1].norm().item())
