"""Loss scale, labels and class dimension of a training: what is read, what is given, what stays, what is refused."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dcl_optim import DCLOptimizer, DCPOptimizer, _sync
from dcl_optim.loss.reader import Loss, LossReader
from tests.helpers import CLASSES, FEATURES, TwoHeads, assert_same, batches, cells, mlp, one, sgd, train, wrap

Criterion = Callable[[Tensor, Tensor], Tensor]
VARIANTS = ["dcl", "dcp"]


def make(variant: str, model: nn.Module, **options: Any) -> Any:
    if variant == "dcl":
        return wrap(model, **options)
    return DCPOptimizer(sgd(model), model, **{"weight": 1.0, "alpha": 0.6} | options)


def learned(optimizer: Any) -> Any:
    """What the forecaster knows."""
    return optimizer.prototypes if isinstance(optimizer, DCPOptimizer) else optimizer.companion.state_dict()


def readings(optimizer: Any) -> list[Loss]:
    """A list to which every reading is added from now on."""
    found: list[Loss] = []
    penalty = optimizer.forecaster.penalty

    def noted(forward: Any, loss: Loss, distance: Any) -> Any:
        found.append(loss)
        return penalty(forward, loss, distance)

    optimizer.forecaster.penalty = noted
    return found


def some_ignored(y: Tensor) -> Tensor:
    return y.where(torch.arange(y.numel()).reshape(y.shape) % 3 != 1, -100)


def squares(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z))


def binary(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z))


def focal(z: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(z, 1).gather(1, y[:, None])
    return ((1 - p) ** 2 * -p.log()).mean()


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1)


def weighted(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=torch.linspace(0.2, 3, z.shape[1]).to(z))


def ignoring(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, some_ignored(y))


def soft(y: Tensor) -> Tensor:
    q = F.one_hot(y, CLASSES).double()
    return 0.7 * q + 0.3 * q.flip(0)


def mixed(z: Tensor, y: Tensor) -> Tensor:
    return 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))


def mixed_and_smoothed(z: Tensor, y: Tensor) -> Tensor:
    return 0.7 * smoothed(z, y) + 0.3 * smoothed(z, y.flip(0))


# ---- scripts ---------------------------------------------------------------------------------------------------------


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, CLASSES, 1)).double()


class LogProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.body(x), 1)


def vectors(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    return list(batches(count))


def dense(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, 2, 4, 3).double(), torch.randint(CLASSES, (2, 4, 3))) for _ in range(count)]


def sequences(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 6, FEATURES).double(), torch.randint(CLASSES, (4, 6))) for _ in range(count)]


def of_tokens(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), some_ignored(y).flatten())


def in_float32(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.float(), y)


def nll_with_class_weights(z: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(z, y, weight=torch.linspace(0.2, 3, CLASSES).to(z))


def same(y: Tensor) -> Tensor:
    return y


# The model, the data, the loss, the labels that the loss means, the dimension of the classes.
SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Criterion, Callable[[Tensor], Tensor], int]] = {
    "mean": (mlp, vectors, F.cross_entropy, same, 1),
    "sum": (mlp, vectors, lambda z, y: F.cross_entropy(z, y, reduction="sum") / 9, same, 1),
    "label smoothing": (mlp, vectors, smoothed, same, 1),
    "label smoothing, ignored rows": (
        mlp,
        vectors,
        lambda z, y: F.cross_entropy(z, some_ignored(y), label_smoothing=0.2),
        some_ignored,
        1,
    ),
    "class weights": (mlp, vectors, weighted, same, 1),
    "focal": (mlp, vectors, focal, same, 1),
    "ignored rows": (mlp, vectors, ignoring, some_ignored, 1),
    "mixup": (mlp, vectors, mixed, soft, 1),
    "mixup, label smoothing": (mlp, vectors, mixed_and_smoothed, soft, 1),
    "log-probabilities": (LogProbabilities, vectors, F.nll_loss, same, 1),
    "log-probabilities, class weights": (LogProbabilities, vectors, nll_with_class_weights, same, 1),
    "(N, K, H, W)": (images, dense, F.cross_entropy, same, 1),
    "(N, K, H, W), ignored": (images, dense, ignoring, some_ignored, 1),
    "(batch, time, classes)": (mlp, sequences, of_tokens, some_ignored, -1),
    "bfloat16": (
        lambda: mlp(dtype=torch.bfloat16),
        lambda: [(x.bfloat16(), y) for x, y in vectors()],
        in_float32,
        same,
        1,
    ),
}


@pytest.mark.parametrize("script", cells(SCRIPTS, *(name for name in SCRIPTS if name not in ("sum", "ignored rows"))))
def test_labels_that_are_read_are_those_that_the_loss_means(script):
    """Prototypes and weights equal those of a script that gives the labels and the dimension."""
    build, data, loss, meant, class_dim = SCRIPTS[script]
    models = [build(), build()]
    reading = DCPOptimizer(sgd(models[0]), models[0], weight=1.0)
    given = DCPOptimizer(sgd(models[1]), models[1], CLASSES, weight=1.0, class_dim=class_dim)
    found = readings(reading)
    for x, y in data():
        reading.zero_grad()
        loss(models[0](x), y).backward()
        reading.step()
        given.zero_grad()
        labels = meant(y)
        given.set_targets(labels)
        loss(models[1](x), y).backward()
        given.step()
        right = labels if labels.is_floating_point() else labels.flatten()
        if right.is_floating_point():
            assert_same(found[-1].labels, right, atol=1e-9)
        elif found[-1].labels.ndim == 1:
            assert torch.equal(found[-1].labels, right.where(right >= 0, CLASSES))
    tolerance = 2e-2 if script == "bfloat16" else 1e-6
    assert_same(models[0], models[1], rtol=tolerance, atol=tolerance / 10)
    assert_same(reading.prototypes, given.prototypes, rtol=tolerance, atol=tolerance / 10)
    assert reading.forecaster.seen.all()
    assert reading.logs() == pytest.approx(given.logs(), rel=10 * tolerance)


@pytest.mark.parametrize(
    ("classes", "smoothing", "steps"),
    cells(
        [(classes, *run) for classes in (2, 5, 10) for run in ((0.0, 400), (0.1, 140))], (2, 0.1, 140), (10, 0.0, 400)
    ),
)
def test_labels_are_read_from_the_first_step_until_the_data_are_known_by_heart(classes, smoothing, steps):
    """With smoothed labels until the gradient is all rounding, where they are not read."""
    torch.manual_seed(0)
    x, y = torch.randn(24, FEATURES), torch.randint(classes, (24,))
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, classes))
    optimizer = DCPOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, weight=0.0)
    found = readings(optimizer)
    train(model, optimizer, [(x, y)] * steps, lambda z, y: F.cross_entropy(z, y, label_smoothing=smoothing))
    assert len(found) == steps
    assert all(torch.equal(loss.labels, y) for loss in found)
    assert model(x).argmax(1).equal(y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_smoothed_labels_of_two_classes_are_read_where_the_model_is_surer_than_every_target(variant, dtype):
    """The gradient then has the sign of the other class in every row, as where the model is sure of the wrong one."""
    model = nn.Linear(2, 2, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    optimizer = make(variant, model, weight=0.0)
    found = readings(optimizer)
    torch.manual_seed(0)
    for size in (1, 1, 1, 5, 8, 12, 1):
        y = torch.randint(2, (32,))
        x = (1.0 + torch.rand(32, 1)) * size * F.one_hot(y, 2) + torch.randn(32, 2) * (size == 1)
        train(model, optimizer, [(x.to(dtype), y)], lambda z, y: 0.25 * smoothed(z, y))
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.25, rel=3e-2)
        # A row that is as sure as its target sends no gradient, so it has no label.
        assert variant == "dcl" or all(((loss.labels == y) | (loss.labels == 2)).all() for loss in found)
        assert len(found) == 1 or dtype == torch.bfloat16  # whose rounding may be all that is left
        found.clear()


def test_mixed_labels_of_a_batch_that_the_model_is_certain_of_tell_neither_shares_nor_scale():
    """What is left of the entries without a share is rounding: the last scale stays."""
    model = nn.Linear(5, 5, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(5))
    optimizer = make("dcp", model, weight=0.0)
    found = readings(optimizer)
    torch.manual_seed(0)
    for size in (1.0, 1.0, 1.0, 20.0, 30.0, 1.0):
        y = torch.randint(5, (16,))
        share = torch.where(torch.arange(16) < 2, 0.6, 1.0)[:, None] if size > 1 else torch.rand(16, 1)
        q = share * F.one_hot(y, 5) + (1 - share) * F.one_hot(y.roll(1), 5)
        found.clear()
        train(
            model, optimizer, [(size * F.one_hot(y, 5) + torch.randn(16, 5), q)], lambda z, q: F.cross_entropy(z, q) / 4
        )
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.25, rel=1e-3)
        assert len(found) == (size == 1)


# ---- what the loss was multiplied by ---------------------------------------------------------------------------------


def trained(factor: float, loss: Criterion = F.cross_entropy, **options: Any) -> tuple[nn.Module, Any]:
    """Train with the loss multiplied by a factor and the gradients divided by it: the factor must cancel."""
    model = mlp()
    optimizer = wrap(model, **options)
    for x, y in batches(20):
        optimizer.zero_grad()
        (factor * loss(model(x), y)).backward()
        for parameter in model.parameters():
            parameter.grad /= factor
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (F.cross_entropy, {}),
        (smoothed, {}),
        (mixed, {}),
        (squares, {"loss_scale": 512.0}),
        (weighted, {"loss_scale": lambda: 512.0}),
    ],
    ids=["auto", "label smoothing", "mixup", "any loss, number", "class weights, callable"],
)
def test_penalty_and_companion_carry_the_factor(loss, options):
    scaled, first = trained(512.0, loss, **options)
    plain, second = trained(1.0, loss, **{"loss_scale": 1.0} if options else {})
    assert_same(scaled, plain, rtol=1e-7, atol=1e-9)
    assert_same(first.companion, second.companion, rtol=1e-7, atol=1e-9)
    assert first.logs()["loss_scale"] == pytest.approx(512.0, rel=1e-6)


@pytest.mark.parametrize("size", [200, 5_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_scale_that_is_read_equals_the_factor(dtype, size):
    """Of the larger batch from the 64 rows that say most, for all."""
    model = mlp(dtype=dtype)
    optimizer = wrap(model)
    for x, y in batches(3, size=size, dtype=dtype):
        optimizer.zero_grad()
        (24.0 * F.cross_entropy(model(x), y.where(y != 3, -100))).backward()
        assert optimizer.logs()["loss_scale"] == pytest.approx(24.0, rel=1e-12 if dtype == torch.float64 else 1e-6)
        optimizer.step()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reads", ["auto", "number"])
def test_micro_batches_equal_one_large_batch(variant, reads):
    def run(parts):
        model = mlp()
        optimizer = make(variant, model, **{"loss_scale": 1 / parts} if reads == "number" else {})
        for x, y in batches(20, size=24):
            optimizer.zero_grad()
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(a), b) / parts).backward()
            optimizer.step()
        return model.state_dict(), learned(optimizer)

    assert_same(run(1), run(3), rtol=1e-10, atol=1e-10)


def summed(variant: str, reduction: str, sizes: tuple[int, ...] = (16,), ignored: int = -1) -> Any:
    """Train on the mean over the labeled rows of the whole batch, which micro-batches of these sizes make up."""
    model = mlp()
    optimizer = make(variant, model)
    for x, y in batches(6, size=sum(sizes)):
        y = y.where(y != ignored, -100)
        optimizer.zero_grad()
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            factor = 1.0 if reduction == "mean" else 1 / int((y != -100).sum())
            (factor * F.cross_entropy(model(a), b, reduction=reduction)).backward()
        optimizer.step()
    return (model.state_dict(), learned(optimizer)), optimizer.logs()["loss_scale"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ignored", [-1, 3])
def test_a_sum_over_the_rows_equals_the_mean(variant, ignored):
    first, second = (summed(variant, reduction, ignored=ignored) for reduction in ("sum", "mean"))
    assert_same(first[0], second[0], rtol=1e-9, atol=1e-10)
    assert first[1] == pytest.approx(second[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_unequal_micro_batches_of_a_sum_equal_one_large_batch(variant):
    assert_same(summed(variant, "sum", (24,))[0], summed(variant, "sum", (20, 4))[0], rtol=1e-10, atol=1e-10)


def test_two_views_in_one_backward_both_count():
    """As one forward of both does, whose loss has the factor 2."""
    found = []
    for together in (False, True):
        model = mlp()
        optimizer = wrap(model, companion=mlp(seed=3))
        for x, y in batches(3):
            optimizer.zero_grad()
            if together:
                (2 * F.cross_entropy(model(torch.cat([x, -x])), torch.cat([y, y]))).backward()
            else:
                (F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)).backward()
            optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found, rtol=1e-10, atol=1e-12)


def scale_after(optimizer: Any, model: nn.Module, loss: Tensor, steps: bool = True) -> float:
    """The loss scale that a backward pass had."""
    optimizer.zero_grad()
    loss.backward()
    if steps:
        optimizer.step()
    return optimizer.logs()["loss_scale"]


def test_where_no_scale_can_be_read_the_last_one_of_a_step_that_was_taken_stays():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    assert scale_after(optimizer, model, 3 * squares(model(x), y)) == 1.0, "before any was read"
    assert scale_after(optimizer, model, 8 * F.cross_entropy(model(x), y)) == 1.0, "settled at a step of 100"
    model = mlp()
    optimizer = wrap(model)
    assert scale_after(optimizer, model, 8 * F.cross_entropy(model(x), y)) == pytest.approx(8.0)
    assert scale_after(optimizer, model, 3 * squares(model(x), y)) == pytest.approx(8.0)
    assert scale_after(optimizer, model, 5 * F.cross_entropy(model(x), y), steps=False) == pytest.approx(5.0)
    assert scale_after(optimizer, model, 3 * squares(model(x), y)) == pytest.approx(8.0)


def loss_state(optimizer: Any) -> dict[str, Any]:
    """What the state says of the loss."""
    state: dict[str, Any] = optimizer.state_dict()[optimizer._key]["loss"]
    return state


def test_a_scale_of_a_step_that_was_not_taken_is_not_in_the_state():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    scale_after(optimizer, model, 8 * F.cross_entropy(model(x), y))
    (5 * F.cross_entropy(model(x), y)).backward()
    state = loss_state(optimizer)
    assert isinstance(state["scale"], float)
    assert state == {"form": "hard 0.0", "scale": pytest.approx(8.0), "class_dim": None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_of_zero_has_the_scale_zero_and_no_penalty(variant):
    """Also the very first, and one after others."""
    model, plain = mlp(), mlp()
    optimizer, base = make(variant, model), sgd(plain)
    x, y = one()

    def nothing(z: Tensor) -> Tensor:
        return F.cross_entropy(z, torch.full_like(y, -100), reduction="sum")

    for _ in range(2):
        assert scale_after(optimizer, model, nothing(model(x))) == 0.0
        assert_same(model, plain)
    train(model, optimizer, vectors(3))
    train(plain, base, [], F.cross_entropy)
    plain.load_state_dict(model.state_dict())
    base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    before = copy.deepcopy(learned(optimizer))
    assert scale_after(optimizer, model, nothing(model(x))) == 0.0
    base.zero_grad()
    nothing(plain(x)).backward()
    base.step()
    assert_same(model, plain)
    if variant == "dcp":
        assert_same(optimizer.prototypes, before)


@pytest.mark.parametrize("reads", [True, False])
def test_so_has_one_of_a_loss_that_cannot_be_read(reads, monkeypatch):
    """As in a ramp's first step, or where a script leaves a loss out."""
    model = mlp()
    optimizer = wrap(model)
    monkeypatch.setattr(_sync, "may_sync", lambda step, tensor: reads)
    train(model, optimizer, vectors(2), squares)
    x, y = one()
    optimizer.zero_grad()
    (0.0 * squares(model(x), y)).backward()
    assert optimizer.logs()["loss_scale"] == 0.0
    assert not any(parameter.grad.any() for parameter in model.parameters())
    optimizer.step()
    train(model, optimizer, vectors(1), squares)
    assert optimizer.logs()["loss_scale"] == 1.0


def test_the_models_own_loss_tells_the_factor_where_the_gradient_of_the_logits_does_not():
    model = mlp()
    optimizer = wrap(own := OwnLoss(model))
    x, y = one()
    (0.25 * own(x, y)["loss"]).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(0.25)


class OwnLoss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        return {"logits": z, "loss": squares(z, y)}


# ---- a scale that is given -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [3.0, 3, lambda: 3, lambda: torch.tensor(3.0), lambda: torch.tensor([3.0]), torch.amp.GradScaler("cpu", 3.0)],
    ids=["float", "int", "callable", "scalar tensor", "tensor of one", "scaler"],
)
def test_a_scale_that_is_given_wins_over_what_the_gradient_says(source):
    model = mlp()
    optimizer = wrap(model, loss_scale=source)
    x, y = one()
    F.cross_entropy(model(x), y).backward()
    assert optimizer.logs()["loss_scale"] == 3.0


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("adaptive", ValueError, r"loss_scale='adaptive' is unknown; pass 'auto'"),
        (0.0, ValueError, r"loss_scale=0.0 must be a positive finite number"),
        (float("nan"), ValueError, r"loss_scale=nan"),
        (None, TypeError, r"loss_scale must be 'auto', a number, a GradScaler or a callable, got None"),
        (True, TypeError, r"got True"),
    ],
)
def test_bad_sources(source, error, message):
    with pytest.raises(error, match=message):
        LossReader(source)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, TypeError, r"loss_scale's callable must return a number or a scalar tensor, got None"),
        (torch.ones(2), TypeError, r"loss_scale's callable must return a number or a scalar tensor"),
        (float("nan"), ValueError, r"loss_scale's callable returned nan"),
    ],
)
def test_a_callable_that_gives_no_factor_is_an_error_before_anything_changes(given, error, message):
    model = mlp()
    optimizer = wrap(model, loss_scale=lambda: given)
    x, y = one()
    with pytest.raises(error, match=message):
        F.cross_entropy(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())
    assert math.isnan(optimizer.logs()["penalty"])


@pytest.mark.parametrize("several", [True, False])
def test_an_unreadable_scale_is_warned_about_once_and_only_when_it_may_matter(several):
    """Where a step has several backward passes, or gradients are in float16 and no scaler of torch's has stepped."""
    model = mlp(dtype=torch.float64 if several else torch.float16)
    optimizer = wrap(model)

    def backward(x: Tensor, y: Tensor) -> None:
        squares(model(x.to(model[0].weight.dtype)), y).backward()

    data = list(batches(6))
    for batch in data[: 3 if several else 1]:  # one backward pass a step in float64: nothing suspicious
        optimizer.zero_grad()
        backward(*batch)
        optimizer.step()
    optimizer.zero_grad()
    if several:
        backward(*data[3])
    with pytest.warns(UserWarning, match=r"pass loss_scale=.*\(1 if"):
        backward(*data[4])
    backward(*data[5])


@pytest.mark.parametrize("entropy_first", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_an_entropy_in_addition_to_the_loss_is_warned_about_in_either_order(entropy_first, asks):
    """The penalty is added with each; DCP refuses or skips the entropy, whose gradient shows no labels."""

    def entropy(z: Tensor) -> Tensor:
        return -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()

    def ask(loss: Tensor) -> None:
        if asks:
            torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        else:
            loss.backward(retain_graph=True)

    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    z = model(x)
    losses = [F.cross_entropy(z, y), entropy(z)]
    with pytest.warns(UserWarning, match=r"loss scale .*cannot be read"):
        list(map(ask, reversed(losses) if entropy_first else losses))
    assert optimizer.logs()["loss_scale"] == 1.0


# ---- labels that are given -------------------------------------------------------------------------------------------


def evaluated(model, x):
    model.eval()
    model(x)
    model.train()


def without_gradients(model, x):
    with torch.no_grad():
        model(x)


def while_frozen(model, x):
    model.requires_grad_(False)
    model(x)
    model.requires_grad_(True)


def by_torch_func(model, x):
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(parameters)


def that_raises(model, x):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(x[:, 1:])


FORWARDS_LEFT_ALONE = [evaluated, without_gradients, while_frozen, by_torch_func, that_raises]


@pytest.mark.parametrize("left_alone", FORWARDS_LEFT_ALONE)
def test_labels_given_before_a_forward_that_is_left_alone_end_with_it(left_alone):
    model = mlp()
    optimizer = make("dcp", model)
    x, y = one()
    optimizer.set_targets(torch.zeros(3, dtype=torch.long))
    left_alone(model, x[:3])
    train(model, optimizer, [(x, y)])
    assert optimizer.forecaster.seen.tolist() == [bool((y == k).any()) for k in range(CLASSES)]


@pytest.mark.parametrize("left_alone", FORWARDS_LEFT_ALONE)
def test_the_batch_that_they_were_meant_for_then_has_none_and_says_so(left_alone):
    model = mlp()
    optimizer = make("dcp", model)
    x, y = one()
    optimizer.set_targets(y)
    left_alone(model, x)
    loss = squares(model(x), y)
    with pytest.raises(
        RuntimeError, match=r"(?s)labels of this batch cannot be read.*set_targets\(labels\) before the forward"
    ):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_that_sets_labels_after_stale_ones_takes_its_own():
    models = [mlp(), mlp()]
    for stale, model in enumerate(models):
        optimizer = make("dcp", model)
        for x, y in batches(3):
            if stale:
                optimizer.set_targets(torch.zeros(16, dtype=torch.long))
                evaluated(model, x)
                optimizer.zero_grad()

            def closure():
                optimizer.set_targets(y)  # noqa: B023
                return F.cross_entropy(model(x), y)  # noqa: B023

            optimizer.step(closure)
    assert_same(*models)


def test_labels_of_two_heads_that_are_processed_first_are_those_given():
    model, criterion = TwoHeads(), nn.CrossEntropyLoss()
    optimizer = make("dcp", model, logits=itemgetter(0))
    x, y = one()
    optimizer.set_targets(y)
    main, side = model(x)
    (criterion(2.0 * main, y) + 0.4 * criterion(side, y.flip(0))).backward()
    optimizer.step()
    assert optimizer.logs()["loss_scale"] == 1.0
    assert_same(optimizer.prototypes[0], main.detach()[y == 0].mean(0), atol=1e-12)


def test_loading_a_state_drops_labels_given_before():
    model = mlp()
    optimizer = make("dcp", model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.set_targets(torch.zeros(16, dtype=torch.long))
    optimizer.load_state_dict(state)
    train(model, optimizer, [one()])
    assert optimizer.forecaster.seen.sum() > 1


LOSSES_OF_TWO = {
    "put together": lambda first, second, labels: F.cross_entropy(torch.cat([first, second]), torch.cat(labels)),
    "mean": lambda first, second, labels: F.cross_entropy((first + second) / 2, labels[0]),
    "one held to the other": lambda first, second, labels: F.mse_loss(first, second),
    "converted": lambda first, second, labels: sum(map(F.cross_entropy, (first.float(), second.float()), labels)),
}


@pytest.mark.parametrize("loss", LOSSES_OF_TWO)
def test_labels_given_before_each_of_two_forwards_are_its_own(loss):
    model = mlp()
    optimizer = make("dcp", model, loss_scale=1.0)
    data, outputs = list(batches(2)), []
    for x, y in data:
        optimizer.set_targets(y)
        outputs.append(model(x))
    labels = [y for _, y in data]
    LOSSES_OF_TWO[loss](*outputs, labels).backward()
    optimizer.step()
    z, y = torch.cat(outputs).detach(), torch.cat(labels)
    for k in y.unique():
        assert_same(optimizer.prototypes[k], z[y == k].mean(0), atol=1e-12)


def test_a_checkpoint_that_recomputes_the_model_leaves_the_next_batchs_labels_alone():
    model = mlp()
    optimizer = make("dcp", model)
    x, y = one()
    optimizer.set_targets(y)
    z = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    optimizer.set_targets(y.flip(0))
    F.cross_entropy(z, y).backward()
    F.cross_entropy(model(x), y).backward()
    both = [model(x).detach()[labels == 0].sum(0) for labels in (y, y.flip(0))]
    optimizer.step()
    expected = sum(both) / (2 * (y == 0).sum())
    assert_same(optimizer.prototypes[0], expected, rtol=1e-9, atol=1e-12)


def test_a_model_inside_a_reentrant_checkpoint_gets_those_of_its_first_forward():
    """That one runs without gradients and is left alone; the recomputation is the forward that is trained."""
    models = [mlp(), mlp()]
    for inside, model in enumerate(models):
        optimizer = make("dcp", model)
        for x, y in batches(3):
            x.requires_grad_()
            optimizer.zero_grad()
            optimizer.set_targets(y)
            z = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True) if inside else model(x)
            F.cross_entropy(z, y).backward()
            optimizer.step()
    assert_same(*models)


def first_class(args: Any, kwargs: Any) -> Tensor:
    return torch.zeros(len(args[0]), dtype=torch.long)


class Labeled(nn.Module):
    """Gets labels under a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("how", ["set_targets", "callable", "keyword"])
def test_labels_that_are_given_outrank_those_that_could_be_read(how):
    model = Labeled()
    targets = {"set_targets": None, "callable": first_class, "keyword": "labels"}[how]
    optimizer = make("dcp", model, targets=targets)
    zeros = torch.zeros(16, dtype=torch.long)
    for x, y in vectors(2):
        optimizer.zero_grad()
        if how == "set_targets":
            optimizer.set_targets(zeros)
        F.cross_entropy(model(x, labels=zeros if how == "keyword" else y), y).backward()
        optimizer.step()
    assert optimizer.forecaster.seen.tolist() == [True] + [False] * (CLASSES - 1)


def test_labels_that_are_given_twice_or_not_at_all_are_an_error():
    model = Labeled()
    optimizer = make("dcp", model, targets="labels")
    x, y = one()
    with pytest.raises(ValueError, match="targets='labels': the model was called without that keyword"):
        model(x)
    optimizer.set_targets(y)
    with pytest.raises(RuntimeError, match="labels twice, from targets= and from set_targets"):
        model(x, labels=y)


@pytest.mark.parametrize("targets", [3, ["labels"]])
def test_bad_targets(targets):
    with pytest.raises(TypeError, match=r"targets must be a keyword's name or a callable \(args, kwargs\) -> labels"):
        LossReader(targets=targets)


# ---- labels that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [binary, squares])
def test_an_unreadable_loss_is_refused_at_the_first_step_before_anything_changes(loss):
    model = mlp()
    optimizer = make("dcp", model)
    x, y = one()
    value = loss(model(x), y)
    with pytest.raises(RuntimeError, match=r"(?s)labels of this batch cannot be read.*set_targets.*targets="):
        value.backward()
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.forecaster.seen.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_first_batch_that_is_not_finite_is_no_reason_for_an_error(variant):
    """As a gradient scaler's that starts too high: entries of labels are infinite, and the others are not."""
    model, expected = (mlp(dtype=torch.float16) for _ in range(2))
    optimizer, other = make(variant, model), make(variant, expected)
    data = [(x.half(), y) for x, y in vectors(3)]
    (2.0**22 * in_float32(model(data[0][0]), data[0][1])).backward()
    optimizer.zero_grad()
    train(model, optimizer, data[1:], in_float32)
    train(expected, other, data[1:], in_float32)
    assert_same(model, expected)
    assert_same(learned(optimizer), learned(other))


@pytest.mark.parametrize(("resumes", "read", "unread"), [(False, 3, 3), (False, 20, 25), (True, 1, 3)])
def test_later_batches_that_cannot_be_read_take_no_part_and_a_warning_says_so_once(resumes, read, unread):
    model, plain = mlp(), mlp()
    optimizer, base = make("dcp", model), sgd(plain)
    data = vectors(read + unread)
    first, rest = data[:read], data[read:]
    train(model, optimizer, first)
    if resumes:
        model, optimizer = resumed(optimizer, model)
    plain.load_state_dict(model.state_dict())
    base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    before = optimizer.prototypes
    with pytest.warns(UserWarning, match=r"(?s)of the last \d+ batches got no penalty.*cannot be read") as caught:
        train(model, optimizer, rest, squares)
    assert len(caught) == 1
    train(plain, base, rest, squares)
    assert_same(model, plain)
    assert torch.equal(optimizer.prototypes, before)


def with_dice(z: Tensor, y: Tensor) -> Tensor:
    """Segmentation's sum of two losses: at equal probabilities its gradient is close to a cross-entropy's."""
    p, q = F.softmax(z, 1), F.one_hot(y, z.shape[1]).to(z)
    return F.cross_entropy(z, y) + 1 - (2 * (p * q).sum(0) / (p.sum(0) + q.sum(0))).mean()


def with_equal_probabilities() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A model that begins with them, and batches in which each class is as frequent as the others."""
    model, generator = mlp(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model[-1].weight.mul_(1e-4)
        model[-1].bias.zero_()
    y = torch.arange(20) % CLASSES
    return model, [(torch.eye(FEATURES)[y].double() + torch.randn(20, FEATURES, generator=generator), y)] * 30


def test_a_loss_whose_first_batches_are_mostly_unreadable_is_refused_as_soon_as_they_are():
    """DCP was on in a few of 200 steps, with one warning."""
    model, data = with_equal_probabilities()
    optimizer = DCPOptimizer(sgd(model, lr=0.02), model)
    found = readings(optimizer)
    refused = pytest.raises(RuntimeError, match=r"(?s)cannot be read.* \(\d+ of the first \d+ could\).*set_targets")
    with pytest.warns(UserWarning, match="batches got no penalty"), refused:
        train(model, optimizer, data, with_dice)
    assert 0 < len(found) < 10
    assert optimizer.logs()["step"] == 2 * len(found), "half of the batches could be read until the last one"


def test_where_the_scale_is_given_labels_of_such_a_loss_are_read_in_every_step():
    model, data = with_equal_probabilities()
    optimizer = DCPOptimizer(sgd(model, lr=0.02), model, loss_scale=1.0)
    found = readings(optimizer)
    train(model, optimizer, data, with_dice)
    assert [torch.equal(loss.labels, y) for loss, (_, y) in zip(found, data, strict=True)] == [True] * 30


def test_with_a_scale_that_is_given_a_label_is_the_only_negative_entry():
    """Of two classes a focal loss is refused without."""
    torch.manual_seed(0)
    data = [(torch.randn(16, FEATURES), torch.randint(2, (16,))) for _ in range(4)]

    def model_of_two() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(FEATURES, 2)

    model, expected = model_of_two(), model_of_two()
    with pytest.raises(RuntimeError, match=r"two classes, .*focal rows \(pass loss_scale=1 then\)"):
        train(model, make("dcp", model), data, focal)
    model.zero_grad()
    reading, given = make("dcp", model, loss_scale=1.0), make("dcp", expected, num_classes=2, loss_scale=1.0)
    train(model, reading, data, focal)
    for batch in data:
        given.set_targets(batch[1])
        train(expected, given, [batch], focal)
    assert_same(model, expected, rtol=1e-6, atol=1e-7)
    assert_same(reading.prototypes, given.prototypes, rtol=1e-6, atol=1e-7)


def test_a_single_row_that_cannot_be_read_takes_no_part():
    """Its prototypes are those of the batch without it, to the rounding of the mean."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4).double()  # of four classes: of five its labels were read as mixed ones
    optimizer = DCPOptimizer(sgd(model), model, weight=0.0)
    x, y = torch.randn(20, FEATURES).double(), torch.arange(20) % 4

    def one_mixed(z: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(z, y, reduction="none")
        return (losses.sum() + F.cross_entropy(z[:1], y[:1] + 1)) / len(losses)

    z = model(x)
    one_mixed(z, y).backward()
    optimizer.step()
    means = torch.stack([z.detach()[1:][y[1:] == k].mean(0) for k in range(4)])
    assert_same(optimizer.prototypes, means, rtol=1e-12)


def test_a_label_that_is_to_be_ignored_is_although_the_loss_does_not():
    model = mlp()
    optimizer = make("dcp", model, ignore_index=0)
    train(model, optimizer, vectors(6))
    assert optimizer.forecaster.seen.tolist() == [False] + [True] * (CLASSES - 1)


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_a_single_logit_is_refused(shape):
    model = nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0) if len(shape) == 1 else nn.Identity())
    optimizer = make("dcp", model)
    with pytest.raises(RuntimeError, match="labels of this batch cannot be read"):
        F.binary_cross_entropy_with_logits(model(torch.randn(8, FEATURES)), torch.ones(shape)).backward()
    assert optimizer.logs()["step"] == 0


def test_too_many_classes_are_refused_at_the_first_backward():
    model = nn.Linear(1, 20_000)
    optimizer = make("dcp", model)
    with pytest.raises(ValueError, match=r"num_classes=20000.*limit 1 GiB.; use DCLOptimizer"):
        F.cross_entropy(model(torch.randn(2, 1)), torch.tensor([0, 1])).backward()
    assert not optimizer.forecaster.seen.any()


def test_a_number_of_classes_that_the_logits_do_not_have_is_an_error():
    model = mlp()
    _optimizer = make("dcp", model, num_classes=CLASSES + 1)  # whose hooks go with it
    x, y = one()
    with pytest.raises(ValueError, match=rf"num_classes={CLASSES + 1} but the model gives {CLASSES} logits"):
        F.cross_entropy(model(x), y).backward()


# ---- the class dimension ---------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Returns its parameter, of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.z = nn.Parameter(torch.randn(shape).double())

    def forward(self) -> Tensor:
        return 1.0 * self.z


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 5, 6), 1), ((4, 5, 6), 2), ((2, 5, 3, 4), 1), ((2, 3, 4, 5), 3), ((2, 2, 2), 2)]
)
def test_the_dimension_along_which_the_gradient_is_a_cross_entropys(shape, dim):
    model = Given(shape)
    optimizer = DCPOptimizer(sgd(model), model)
    rows = model().movedim(dim, -1).flatten(0, -2)
    y = torch.randint(rows.shape[1], (len(rows),))
    F.cross_entropy(rows, y).backward()
    optimizer.step()
    assert optimizer.prototypes.shape == (shape[dim], shape[dim])
    assert loss_state(optimizer)["class_dim"] == dim
    k = int(y[0])
    assert_same(optimizer.prototypes[k], rows.detach()[y == k].mean(0), rtol=1e-12)


@pytest.mark.parametrize("distance", ["kl", "infonce"])
def test_dcl_finds_the_dimension_of_the_classes(distance):
    found = []
    for class_dim in (None, -1):
        model = mlp()
        options = {"distance": distance, "class_dim": class_dim, "companion": mlp(seed=3)}
        train(model, wrap(model, **options), sequences(5), of_tokens)
        found.append(model)
    assert_same(*found, rtol=1e-12, atol=1e-12)


def test_a_dimension_that_is_given_wins():
    found = []
    for class_dim in (None, 1):
        model = mlp()
        options = {"distance": "kl", "class_dim": class_dim, "companion": mlp(seed=3)}
        train(model, wrap(model, **options), sequences(5), of_tokens)
        found.append(model)
    with pytest.raises(AssertionError):
        assert_same(*found, rtol=1e-3)


def test_a_dimension_that_the_logits_do_not_have_is_an_error_in_the_forward():
    model = mlp()
    _optimizer = wrap(model, class_dim=2)
    with pytest.raises(ValueError, match=r"class_dim=2 but the model's logits have shape \(16, 5\)"):
        model(one()[0])


@pytest.mark.parametrize(("distance", "warns"), [("mse", False), ("kl", True)])
def test_where_no_dimension_is_found_the_first_is_taken_and_those_that_it_matters_for_say_so(distance, warns):
    model = mlp()
    optimizer = wrap(model, distance=distance, loss_scale=1.0)
    x, _ = sequences(1)[0]
    found = readings(optimizer)
    for warned in (warns, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            F.mse_loss(model(x), torch.zeros(4, 6, CLASSES).double()).backward()
        assert [("class_dim" in str(w.message)) for w in caught] == [True] * warned
    assert [loss.class_dim for loss in found] == [1, 1]


@pytest.mark.parametrize("first", ["ignored", "not finite"])
@pytest.mark.parametrize("num_classes", [None, CLASSES])
def test_the_dimension_is_not_final_before_some_rows_had_labels(first, num_classes):
    """Such a batch does not say which dimension holds the classes: the next one was an error about time as K."""
    model = mlp()
    optimizer = make("dcp", model, num_classes=num_classes)
    (x, y), *rest = sequences(3)
    if first == "ignored":
        F.cross_entropy(model(x).flatten(0, 1), torch.full_like(y, -100).flatten(), reduction="sum").backward()
        optimizer.step()
    else:
        (of_tokens(model(x), y) * torch.inf).backward()
        optimizer.zero_grad()
    assert not optimizer.forecaster.seen.any()
    train(model, optimizer, rest, of_tokens)
    assert optimizer.prototypes.shape == (CLASSES, CLASSES)
    assert optimizer.forecaster.seen.all()


# ---- the state -------------------------------------------------------------------------------------------------------


def resumed(optimizer: Any, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    again = copy.deepcopy(model)
    second = type(optimizer)(sgd(again), again, weight=1.0, **options)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again, second


@pytest.mark.parametrize("loss", [F.cross_entropy, smoothed, weighted], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    ("copied", "steps"),
    cells(
        itertools.product(["state_dict", "deepcopy", "pickle"], [0, 3]),
        *(("state_dict", 0), ("state_dict", 3), ("deepcopy", 3), ("pickle", 0)),
    ),
)
def test_a_run_that_was_resumed_equals_one_that_was_not(steps, copied, loss):
    data = vectors(8)
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, weight=1.0)
    train(model, optimizer, data[:steps], loss)
    if copied == "state_dict":
        second, other = resumed(optimizer, model)
    elif copied == "deepcopy":
        second, other = copy.deepcopy((model, optimizer))
    else:
        second, other = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, data[steps:], loss)
    train(second, other, data[steps:], loss)
    assert_same(model, second)
    assert torch.equal(optimizer.prototypes, other.prototypes)


def test_a_resumed_run_knows_form_and_scale_before_a_gradient_tells():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    train(model, optimizer, [(x, y)], lambda z, y: 8 * smoothed(z, y))
    again, second = resumed(optimizer, model)
    assert scale_after(second, again, 3 * squares(again(x), y)) == pytest.approx(8.0, rel=1e-6)
    assert loss_state(second) == loss_state(optimizer)


@pytest.mark.parametrize(("kind", "options"), [(DCPOptimizer, {}), (DCLOptimizer, {"distance": "kl"})])
def test_a_resumed_run_knows_the_dimension_of_the_classes_before_a_gradient_tells(kind, options):
    model = mlp()
    optimizer = kind(sgd(model), model, weight=1.0, **options)
    data = sequences(3)
    train(model, optimizer, data[:1], of_tokens)
    again, second = resumed(optimizer, model, **options)
    for net, wrapped in ((model, optimizer), (again, second)):
        train(net, wrapped, data[1:2], lambda z, y: 0 * z.sum())  # as of a batch whose labels are all ignored
        train(net, wrapped, data[2:], of_tokens)
    assert_same(model, again)


# ---- without a synchronization ---------------------------------------------------------------------------------------


class NothingRead(TorchDispatchMode):
    """Raises where the host would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        masked = "index_put" in name or name.startswith("aten::index.")
        masks = masked and any(index is not None and index.dtype == torch.bool for index in args[1])
        if masks or any(part in name for part in ("_local_scalar_dense", "nonzero", "aten::equal", "unique")):
            raise AssertionError(f"{func} synchronizes")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_synchronization(optimizer: Any) -> Iterator[None]:
    """Nothing may be read from step 3 on."""
    read = LossReader.read

    def watched(reader: LossReader, forward: Any, gradient: Tensor, several: bool) -> Loss:
        if forward.step < 3:
            return read(reader, forward, gradient, several)
        with NothingRead():
            return read(reader, forward, gradient, several)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sync, "may_sync", lambda step, tensor: step < 3)
        patch.setattr(LossReader, "read", watched)
        yield


def with_short_batches(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    return [(x[:3], y[:3]) if step > 4 else (x, y) for step, (x, y) in enumerate(vectors(count))]


def with_two_rows_in_between(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    return [(x[:2], y[:2]) if step > 4 and step % 2 else (x, y) for step, (x, y) in enumerate(vectors(count))]


def certain_mlp() -> nn.Module:
    """A model that is rather certain of wrong classes: labels are wrong where the loss's factor is guessed too high."""
    model = mlp()
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(5.0)
    return model


SILENT = {name: SCRIPTS[name][:3] for name in SCRIPTS if name not in ("sum", "bfloat16", "(N, K, H, W), ignored")}
SILENT["sum, short batches"] = mlp, with_short_batches, lambda z, y: F.cross_entropy(z, y, reduction="sum") / 16
SILENT["sum, short batches, label smoothing"] = (
    certain_mlp,
    with_two_rows_in_between,
    lambda z, y: F.cross_entropy(z, y, reduction="sum", label_smoothing=0.1) / 16,
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("script", SILENT)
def test_without_synchronization_a_training_is_the_same(script, variant):
    build, data, loss = SILENT[script]
    results = []
    for silent in (False, True):
        model = build()
        optimizer = make(variant, model)
        if silent:
            with no_synchronization(optimizer):
                train(model, optimizer, data(), loss)
        else:
            train(model, optimizer, data(), loss)
        results.append((model.state_dict(), learned(optimizer), optimizer.state_dict()["state"]))
    assert_same(*results, rtol=1e-9, atol=1e-11)
    plain = build()
    train(plain, sgd(plain), data(), loss)
    with pytest.raises(AssertionError):
        assert_same(plain.state_dict(), results[0][0], rtol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", ["zero", "unreadable", "other factor"])
def test_without_synchronization_a_batch_that_is_unlike_the_others(batch, variant):
    """A gradient of zero gets no penalty, an unreadable one the last scale; a factor may jump, as a scaler's does."""
    results = []
    for silent in (False, True):
        model = mlp()
        optimizer = make(variant, model)
        with no_synchronization(optimizer) if silent else warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*the labels of this batch cannot be read")
            for step, data in enumerate(batches(8)):
                factor = 64.0 if batch == "other factor" and step >= 5 else 1.0
                other = {"zero": lambda z, y: 0 * z.sum(), "unreadable": squares}.get(batch, F.cross_entropy)
                loss = other if step == 5 else F.cross_entropy
                train(model, optimizer, [data], lambda z, y, loss=loss, factor=factor: factor * loss(z, y))
                results.append(optimizer.logs()["loss_scale"])
        results.append((model.state_dict(), learned(optimizer)))
    first, second = results[:9], results[9:]
    if variant == "dcl":  # in DCP such a row has no label, whatever the scale
        assert first[:8] == pytest.approx(second[:8], rel=1e-9)
    assert_same(first[8], second[8], rtol=1e-9, atol=1e-11)


# ---- rows that the model is certain of, and heads of zeros -----------------------------------------------------------


class Same(nn.Module):
    """Logits that the test chooses: the model returns its input."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(classes))

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.weight


def certain_rows(margin: float) -> tuple[Tensor, Tensor]:
    """Eight of 32 rows are certain, and no row has class 0, which is masked."""
    z, y = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), 1 + torch.arange(32) % 5
    z[range(8), y[:8]] += margin
    z[:, 0] = -1e9
    return z, y


def test_a_masked_class_is_not_the_label_of_a_certain_row_with_class_weights():
    (z, y), model = certain_rows(60.0), Same(6)
    optimizer = DCPOptimizer(sgd(model, lr=0.0), model)
    F.cross_entropy(model(z), y, torch.linspace(0.5, 2.0, 6)).backward()
    optimizer.step()
    assert optimizer.forecaster.seen.tolist() == [False, *[True] * 5]


def test_certain_rows_with_a_masked_class_leave_the_scale_of_a_mean():
    (z, y), model = certain_rows(90.0), Same(6)
    optimizer = DCLOptimizer(sgd(model, lr=0.0), model)
    (0.5 * F.cross_entropy(model(z), y)).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(0.5, rel=1e-5)


def test_two_classes_a_pixel_are_not_refused_while_the_head_is_zero():
    model = nn.Conv2d(3, 2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = DCPOptimizer(sgd(model), model)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(2, (4, 8, 8), generator=generator)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.forecaster.seen.all()


UNIFORM = [0.0, 0.002]  # spreads of the logits


@pytest.mark.parametrize("spread", UNIFORM)
def test_mixed_labels_of_uniform_predictions_are_read_along_the_classes_alone(spread):
    """Along another dimension the gradient lies on a line too, but its rows do not sum to zero."""
    model, q = Same(27), F.one_hot(torch.arange(24), 27).float()
    optimizer = DCPOptimizer(sgd(model), model)
    z = spread * torch.randn(4, 6, 27, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(z).flatten(0, 1), 0.63 * q + 0.37 * q.flip(0)).backward()
    assert optimizer.prototypes.shape == (27, 27)


@pytest.mark.parametrize("spread", UNIFORM)
def test_a_binary_loss_of_uniform_predictions_is_not_taken_for_mixed_labels(spread):
    model = Same(8)
    optimizer = DCPOptimizer(sgd(model), model)
    z = spread * torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="labels of this batch cannot be read"):
        binary(model(z), torch.arange(12) % 8).backward()
    assert optimizer.prototypes.numel() == 0


def test_labels_with_a_penalty_on_their_logits_are_not_taken_for_mixed_labels_in_bfloat16():
    """Their shares would sum to about 0.95, which is more than rounding."""
    model, y = Same(12).bfloat16(), torch.arange(36) % 12
    optimizer = DCPOptimizer(sgd(model), model)
    z = (0.1 * torch.randn(36, 12, generator=torch.Generator().manual_seed(0)) + 0.05).bfloat16()
    logits = model(z).float()
    loss = F.cross_entropy(logits, y) + 0.5 * logits[torch.arange(36), y].square().mean()
    with pytest.raises(RuntimeError, match="labels of this batch cannot be read"):
        loss.backward()
    assert optimizer.prototypes.numel() == 0


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("margin", [9.0, 12.0, 40.0, 78.0])
def test_class_weights_of_rows_that_are_certain_count_in_the_scale(classes, margin):
    """1 - p of such a row is rounding, but the other entries of its gradient are exact."""
    model, y = Same(classes), torch.arange(64) % classes
    learned = torch.arange(classes) < classes // 2
    z = torch.randn(64, classes, generator=torch.Generator().manual_seed(0))
    z += margin * learned[y][:, None] * F.one_hot(y, classes)
    optimizer = DCLOptimizer(sgd(model), model)
    F.cross_entropy(model(z), y, torch.where(learned, 0.2, 2.0)).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(("classes", "factor"), [(100, 64.0), (1000, 1.0), (1000, 64.0)])
def test_certain_rows_with_class_weights_are_read_in_float16_too(classes, factor):
    """Their small entries are rounded more than the label's."""
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(32, classes, generator=generator), torch.arange(32)
    z[range(32), y] += torch.tensor([14.0] * 16 + [4.0] * 16)
    model = Same(classes).half()
    model.forward = lambda z: z * model.weight[0, 0]
    optimizer = DCPOptimizer(sgd(model), model)
    found = readings(optimizer)
    weights = 0.1 + 2 * torch.rand(classes, generator=generator)
    (factor * F.cross_entropy(model(z.half()).float(), y, weights)).backward()
    labels = found[0].labels
    assert torch.equal(labels[labels < classes], y[labels < classes])
    assert float(found[0].scale) == pytest.approx(factor, rel=0.15)
