"""What the line reads of a loss in a training: labels, loss scale, class dimension; what stays, and what is refused."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcl_optim import DCPOptimizer
from dcl_optim.loss.reader import Form, LossReader, Unread
from dcl_optim.progress import Forward
from dcl_optim.pytorch import synchronization
from tests.adversary.fitting import Training, run
from tests.helpers import (
    CLASSES,
    FEATURES,
    all_warnings,
    assert_same,
    batches,
    every,
    fit,
    mlp,
    one,
    read_values_as_on_a_device,
    resume,
    sgd,
    skip_smoothing_of_torch_2_6,
    train,
    training_forwards,
)
from tests.reference import CLOSE, EACH, EACH_WAY, GOES_ON_BY_THE_TERM, NEAR, assert_same_training, learned, wrap
from tests.reference import train as train_by

Criterion = Callable[[Tensor, Tensor], Tensor]


# ---- the line equals the term with the labels and the factor that the loss means -------------------------------------


def some_ignored(y):
    return y.where(torch.arange(y.numel()).reshape(y.shape) % 3 != 1, -100)


def squares(z, y):
    return F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z))


def smoothed(z, y):
    return F.cross_entropy(z, y, label_smoothing=0.1)


def weighted(z, y):
    return F.cross_entropy(z, y, weight=torch.linspace(0.2, 3, z.shape[1]).to(z))


def mixed(z, y):
    return 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))


def of_tokens(z, y):
    return F.cross_entropy(z.flatten(0, -2), some_ignored(y).flatten())


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, CLASSES, 1)).double()


def log_probabilities():
    return mlp().append(nn.LogSoftmax(1))


def vectors(count=12):
    return list(batches(count))


def dense(count=12):
    torch.manual_seed(1)
    return [(torch.randn(2, 2, 4, 3).double(), torch.randint(CLASSES, (2, 4, 3))) for _ in range(count)]


def sequences(count=12):
    torch.manual_seed(1)
    return [(torch.randn(4, 6, FEATURES).double(), torch.randint(CLASSES, (4, 6))) for _ in range(count)]


def plain(z, y):
    return z, y


def ignored(z, y):
    return z, some_ignored(y)


def tokens(z, y):
    return z.flatten(0, 1), some_ignored(y).flatten()


class Script(NamedTuple):
    """A script, and what its loss means: logits and labels as the term takes them, and the factor of their mean."""

    loss: Criterion
    meant: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = plain
    factor: Callable[[Tensor, Tensor], Any] = lambda z, y: 1.0
    model: Callable[[], nn.Module] = mlp
    data: Callable[[], list[tuple[Tensor, Tensor]]] = vectors


SCRIPTS = {
    "mean": Script(F.cross_entropy),
    "sum": Script(lambda z, y: F.cross_entropy(z, y, reduction="sum") / 9, factor=lambda z, y: 16 / 9),
    "label smoothing": Script(smoothed),
    "label smoothing, ignored rows": Script(lambda z, y: smoothed(z, some_ignored(y)), ignored),
    "ignored rows": Script(lambda z, y: F.cross_entropy(z, some_ignored(y)), ignored),
    "log-probabilities": Script(F.nll_loss, model=log_probabilities),
    "(N, K, H, W)": Script(F.cross_entropy, model=images, data=dense),
    "(N, K, H, W), ignored": Script(
        lambda z, y: F.cross_entropy(z, some_ignored(y)), ignored, model=images, data=dense
    ),
    "(batch, time, classes)": Script(of_tokens, tokens, data=sequences),
    "bfloat16": Script(
        lambda z, y: F.cross_entropy(z.float(), y),
        model=lambda: mlp(dtype=torch.bfloat16),
        data=lambda: [(x.bfloat16(), y) for x, y in vectors()],
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_read_is_what_the_loss_means(name):
    """Labels, dimension and factor: weights, prototypes and logs are those of the penalty as a term."""
    script = SCRIPTS[name]
    models = [script.model(), script.model()]
    line, term = (DCPOptimizer(sgd(model, lr=0.03), model, weight=1.0) for model in models)
    tolerance = 2e-2 if name == "bfloat16" else 1e-6
    for x, y in script.data():
        train(models[0], line, [(x, y)], lambda z, y: 3 * script.loss(z, y))
        term.zero_grad()
        z = models[1](x)
        (3 * (script.loss(z, y) + script.factor(z, y) * term.penalty(*script.meant(z, y)))).backward()
        term.step()
    assert_same(*models, rtol=tolerance, atol=tolerance / 10)
    assert_same(line.prototypes, term.prototypes, rtol=tolerance, atol=tolerance / 10)
    assert line.logs() == pytest.approx(term.logs(), rel=10 * tolerance)


# ---- what the loss was multiplied by ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 60_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_scale_that_is_read_equals_the_factor(dtype, size):
    model = mlp(dtype=dtype)
    optimizer = wrap("dcl", model)
    for x, y in batches(3, size=size, dtype=dtype):
        optimizer.zero_grad()
        (24.0 * F.cross_entropy(model(x), y.where(y != 3, -100))).backward()
        assert optimizer.logs()["loss_scale"] == pytest.approx(24.0, rel=1e-12 if dtype == torch.float64 else 1e-6)
        optimizer.step()


def test_the_first_batch_of_many_pixels_is_read():
    """The norm of many equal numbers in float32, as of a fresh head's gradient, is wrong by up to 0.8 % on a CPU."""
    head = nn.Conv2d(1, 21, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = wrap("dcl", head)
    labels = torch.randint(21, (2, 440, 440))
    (F.cross_entropy(head(torch.randn(2, 1, 440, 440)), labels) / 3.0).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1 / 3, rel=1e-3)


def test_the_first_look_takes_rows_that_have_a_gradient():
    """Where the first million logits are of ignored rows, and where one row of very many is another."""
    optimizer = wrap("dcp", nn.Linear(2, 8))
    torch.manual_seed(0)
    x, y = torch.randn(160_000, 2), torch.randint(8, (160_000,))
    y[:140_000] = -100
    fit(optimizer, [(x, y)])
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0, rel=1e-4)
    assert (optimizer.logs()["skipped"], optimizer.logs()["penalty"]) == (0, 0)
    assert optimizer.prototypes.any(1).all()


def resumed(optimizer, variant, **options):
    again = wrap(variant, mlp(), **options)
    resume(again, optimizer)
    return again


def without_the_wrapper(optimizer):
    """The model and its base optimizer as they are now."""
    bare = mlp()
    base = sgd(bare)
    bare.load_state_dict(optimizer.model.state_dict())
    base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    return bare, base


@EACH
def test_nothing_learns_from_a_gradient_of_zero(variant):
    """Also if it is the very first."""
    model, untrained = mlp(), mlp()
    optimizer = wrap(variant, model)
    x, y = one()

    def nothing(z, y):
        return F.cross_entropy(z, torch.full_like(y, -100), reduction="sum")

    fit(optimizer, [(x, y)] * 2, nothing)
    assert_same(model, untrained)
    fit(optimizer, vectors(3))
    bare, base = without_the_wrapper(optimizer)
    before = copy.deepcopy(learned(optimizer))
    fit(optimizer, [(x, y)], nothing)
    train(bare, base, [(x, y)], nothing)
    assert_same(model, bare)
    assert_same(learned(optimizer), before)
    assert math.isnan(optimizer.logs()["penalty"])
    assert optimizer.logs()["skipped"] == 0


# ---- batches that tell no form ---------------------------------------------------------------------------------------


def one_row_of_two_classes():
    return nn.Linear(FEATURES, 2).double(), [
        (torch.randn(1, FEATURES).double(), torch.randint(2, (1,))) for _ in range(25)
    ]


def a_prior():
    """A head that predicts the background in every row."""
    model = nn.Linear(FEATURES, 4).double()
    with torch.no_grad():
        model.weight.mul_(0.1)
        model.bias.copy_(torch.tensor([8.0, 0.0, 0.0, 0.0]))
    return model, [(torch.randn(16, FEATURES).double(), torch.randint(4, (16,))) for _ in range(25)]


def certain():
    model = nn.Linear(FEATURES, FEATURES).double()
    with torch.no_grad():
        model.weight.copy_(30 * torch.eye(FEATURES))
    y = torch.randint(FEATURES, (25, 16))
    return model, [(F.one_hot(labels, FEATURES) + 0.02 * torch.randn(16, FEATURES).double(), labels) for labels in y]


@pytest.mark.guard
@EACH
def test_after_20_batches_that_tell_nothing_the_loss_is_refused(variant):
    """Among which gradients that are zero or not finite are not."""
    model, data = one_row_of_two_classes()
    optimizer = wrap(variant, model, sgd(model, lr=0.0))
    for factor in (0.0, torch.inf):
        for x, y in data:
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(x), y)).backward()
    optimizer.zero_grad()
    before = optimizer.logs()["skipped"]
    fit(optimizer, data[:19])
    assert optimizer.logs()["skipped"] == before + 19
    assert math.isnan(optimizer.logs()["penalty"])
    with pytest.raises(RuntimeError, match=r"(?s)batches that show no form.*loss \+ optimizer.penalty\(logits"):
        fit(optimizer, data[19:20])


@pytest.mark.guard
@EACH
@pytest.mark.parametrize(("script", "silent"), [(a_prior, 0), (certain, 19)])
def test_a_model_that_is_certain_of_every_row_is_read_with_one_warning(script, silent, variant):
    """From the 20th batch on, if what is left of its rows is below the rounding of float32."""
    model, data = script()
    optimizer = wrap(variant, model, sgd(model, lr=0.0))
    with all_warnings() as caught:
        fit(optimizer, data, lambda z, y: F.cross_entropy(z, y) / 8)
    assert [str(warning.message).partition(".")[0] for warning in caught] == [
        "the model is certain of every row of the first batches"
    ]
    assert "class weight" in str(caught[0].message)
    assert optimizer.logs()["skipped"] == silent
    assert optimizer.logs()["loss_scale"] == pytest.approx(1 / 8)
    with pytest.warns(UserWarning, match="a batch gets no penalty"):
        fit(optimizer, [(0.1 * x, y) for x, y in data[:1]], weighted)


@pytest.mark.guard
@EACH
def test_batches_whose_rows_are_alike_end_no_run_of_a_certain_model(variant):
    """They have the form with any factor, and contradict none; here the first batch alone has rows that differ."""
    model = nn.Linear(10, 10, bias=False).double()
    nn.init.eye_(model.weight)
    y = torch.arange(16).remainder(10)
    alike = 30.0 * F.one_hot(y, 10).double()
    differ = alike + torch.linspace(-0.9, 1.5, 16).unsqueeze(1) * F.one_hot(y, 10)
    data = [(differ, y), *[(alike, y)] * 24]
    optimizer = wrap(variant, model, sgd(model, lr=0.0))
    with all_warnings() as caught:
        fit(optimizer, data)
    assert [str(w.message).partition(".")[0] for w in caught] == [
        "the model is certain of every row of the first batches"
    ]
    assert optimizer.logs()["skipped"] == 19


@pytest.mark.guard
@pytest.mark.parametrize("loss", [weighted, mixed])
def test_other_losses_of_a_model_that_is_certain_of_every_row_are_refused_at_the_20th_batch(loss):
    model, data = a_prior()
    optimizer = wrap("dcp", model, sgd(model, lr=0.0))
    fit(optimizer, data[:19], loss)
    with pytest.raises(RuntimeError, match="batches that show no form"):
        fit(optimizer, data[19:20], loss)


@pytest.mark.guard
@EACH
@pytest.mark.parametrize(("dtype", "skipped"), [(torch.float32, 19), (torch.float16, 25)])
def test_a_model_that_is_certain_and_right_ends_no_run(dtype, skipped, variant):
    """The labels' entries are 0, so that rows do not sum to 0; in float16 the others are but rounding, too."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False).to(dtype)
    nn.init.eye_(model.weight)
    optimizer = wrap(variant, model, sgd(model, lr=0.0))
    y = torch.randint(3, (25, 16))
    x = ((10.0 if dtype == torch.float16 else 25.0) * F.one_hot(y, 3) + torch.randn(25, 16, 3)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, zip(x, y, strict=True))
    assert optimizer.logs()["skipped"] == skipped
    train(model, optimizer, zip(x / 20.0, y, strict=True))
    assert optimizer.logs()["skipped"] == skipped
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0, rel=1e-2)


def test_a_reader_without_its_guard_counts_what_it_does_not_read():
    reader = LossReader(reads_labels=True)
    for number, (loss, form, unread) in enumerate(
        [(weighted, None, Unread.FACTORS), (squares, None, Unread.SUMS), (F.cross_entropy, Form(0.0), None)]
    ):
        z = torch.randn(8, CLASSES, requires_grad=True)
        forward = Forward(z, number + 1)
        (g,) = torch.autograd.grad(loss(z, torch.arange(8) % CLASSES), z)
        assert (reader.read(forward, g) is None) == (form is None)
        assert (reader.form, reader.unread, reader.num_skipped) == (form, unread, min(number + 1, 2))


# ---- trainings until the model fits ----------------------------------------------------------------------------------

BF16, FP16 = torch.bfloat16, torch.float16
FITTED = {
    "a scaler that grows": Training(0, 300, FP16, "transposed", smoothing=0.2, growth=10, steps=160),
    "many classes, smoothing": Training(0, 1000, layout="transposed", smoothing=0.1, lr=2e-2, steps=100),
    "bfloat16, classes not last": Training(0, 5, BF16, "transposed", steps=300, lr=1e-2),
    "bfloat16, images": Training(0, 5, BF16, "images", steps=200, lr=1e-2),
    "a checkpoint that fits": Training(0, 4, BF16, smoothing=0.1, before=200, steps=30),
    "a checkpoint of two classes": Training(1, 2, FP16, smoothing=0.03, noise=0.1, before=200, steps=60),
    "a factor that falls": Training(
        0, 5, BF16, smoothing=0.2, steps=300, factor=lambda step: 0.25 if step > 150 else 1.0
    ),
    "a factor that rises": Training(
        0, 5, BF16, smoothing=0.2, steps=300, factor=lambda step: 1.0 if step > 150 else 0.1
    ),
    "ignored rows, sum": Training(0, 3, BF16, smoothing=0.1, reduction="sum", ignored=0.9, steps=200),
    "many classes": Training(0, 8000, layout="transposed", lr=2e-2, steps=60),
    "smoothing of the other classes": Training(0, 10, BF16, smoothing=0.1, is_spread=True),
    "smoothing of the other classes, float32": Training(0, 10, smoothing=0.1, is_spread=True),
    "a checkpoint that is surer than its labels": Training(0, 10, BF16, smoothing=0.1, before=200, steps=30, sure=1.5),
    "two classes": Training(0, 2, steps=400),
    "two classes, smoothing": Training(0, 2, smoothing=0.1),
    "ten classes": Training(0, 10, steps=400),
    "ten classes, smoothing": Training(0, 10, smoothing=0.1),
}
PLACES = {
    f"{dtype}, {place}, smoothing of {smoothing}": Training(0, 10, dtype, place=place, smoothing=smoothing, steps=200)
    for dtype, place, smoothing in itertools.product((BF16, FP16), ("pure", "outside", "inside"), (0.0, 0.1))
}


@pytest.mark.parametrize("name", [*FITTED, *every(5, PLACES)])
def test_labels_and_factor_of_every_batch_are_read_until_the_model_fits(name):
    training = (FITTED | PLACES)[name]
    skip_smoothing_of_torch_2_6(training.dtype, training.smoothing)
    counts = run(training)
    assert (counts["ended"], counts["unread"], counts["wrong"], counts["off"]) == (0, 0, 0, 0)
    assert counts["batches"] > 20


@EACH
def test_batches_that_tell_nothing_are_left_out_until_one_tells_the_form(variant):
    model, data = certain()
    optimizer = wrap(variant, model, sgd(model, lr=0.0))
    fit(optimizer, data[:10], lambda z, y: F.cross_entropy(z, y) / 8)
    fit(optimizer, [(0.1 * x, y) for x, y in data[10:11]], lambda z, y: F.cross_entropy(z, y) / 8)
    assert optimizer.logs()["loss_scale"] == pytest.approx(1 / 8)
    fit(optimizer, data[11:], lambda z, y: F.cross_entropy(z, y) / 8)
    assert optimizer.logs()["skipped"] == 10
    assert optimizer.logs()["loss_scale"] == pytest.approx(1 / 8)


@EACH
def test_a_batch_that_tells_no_scale_keeps_the_last_one(variant):
    """One row of which the model is so certain that its probability less 1 is off by some per cent in float32."""
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    optimizer = wrap(variant, model, sgd(model, lr=0.0))
    found = []
    first = (2.0 * torch.eye(3).repeat(4, 1), torch.arange(12) % 3)
    for x, y in (first, (torch.tensor([[15.5, 0, 0]]), torch.tensor([0]))):
        fit(optimizer, [(x, y)], lambda z, y: 8 * F.cross_entropy(z.double(), y))
        found.append(optimizer.logs()["loss_scale"])
    assert found == [pytest.approx(8.0, rel=1e-5), found[0]]


# ---- labels ----------------------------------------------------------------------------------------------------------


@EACH
def test_a_first_batch_that_is_not_finite_is_no_reason_for_an_error(variant):
    """As a gradient scaler's that starts too high: entries of labels are infinite, and the others are not."""

    def in_float32(z, y):
        return F.cross_entropy(z.float(), y)

    model, expected = (mlp(dtype=torch.float16) for _ in range(2))
    optimizer, other = wrap(variant, model), wrap(variant, expected)
    data = [(x.half(), y) for x, y in vectors(3)]
    (2.0**22 * in_float32(model(data[0][0]), data[0][1])).backward()
    optimizer.zero_grad()
    fit(optimizer, data[1:], in_float32)
    fit(other, data[1:], in_float32)
    assert_same_training(optimizer, other)


@pytest.mark.guard
@EACH
@pytest.mark.parametrize(
    ("resumes", "num_read", "loss"),
    [(False, 3, squares), (True, 1, squares), (False, 2, weighted), (False, 2, mixed), (False, 2, F.nll_loss)],
)
def test_later_batches_that_cannot_be_read_get_no_penalty_and_a_warning_says_so_once(resumes, num_read, loss, variant):
    """Fewer than 20 end no run. That of logits by ``nll_loss`` has no positive entry, as rows without a gradient."""
    optimizer = wrap(variant, mlp())
    fit(optimizer, vectors(num_read))
    if resumes:
        optimizer = resumed(optimizer, variant)
    bare, base = without_the_wrapper(optimizer)
    before = copy.deepcopy(learned(optimizer))
    what = "labels" if variant == "dcp" else "factor"
    with pytest.warns(UserWarning, match=rf"(?s)a batch gets no penalty: .*cannot read the {what}") as caught:
        fit(optimizer, vectors(19), loss)
    assert len(caught) == 1
    train(bare, base, vectors(19), loss)
    assert_same(optimizer.model, bare)
    assert_same(learned(optimizer), before)
    assert math.isnan(optimizer.logs()["penalty"])
    assert optimizer.logs()["skipped"] == 19
    assert optimizer.state_dict()[optimizer._key]["loss"]["scale"] == pytest.approx(1.0)


@pytest.mark.guard
@pytest.mark.parametrize("resumes", [False, True])
@EACH
def test_after_100_steps_nothing_ends_the_run(variant, resumes):
    """It tells of 1, 2, 4, ... unread batches; their gradients are those of the base."""
    optimizer = wrap(variant, mlp())
    fit(optimizer, vectors(100))
    if resumes:
        optimizer = resumed(optimizer, variant)
    bare, base = without_the_wrapper(optimizer)
    with all_warnings() as caught:
        fit(optimizer, vectors(70), weighted)
    assert [str(warning.message).split(":")[0] for warning in caught] == [
        "a batch gets no penalty",
        *(f"a batch gets no penalty, {number} so far" for number in (2, 4, 8, 16, 32, 64)),
    ]
    assert all(
        f"optimizer.penalty({'logits, labels' if variant == 'dcp' else 'logits'})" in str(w.message) for w in caught
    )
    assert optimizer.logs()["skipped"] == 70
    train(bare, base, vectors(70), weighted)
    assert_same(optimizer.model, bare)
    fit(optimizer, vectors(1))
    assert optimizer.logs()["skipped"] == 70


@pytest.mark.guard
@EACH
def test_where_values_may_not_be_read_unread_batches_are_warned_of_in_the_next_step_that_may(variant, monkeypatch):
    read_values_as_on_a_device(monkeypatch)
    optimizer = wrap(variant, mlp())
    fit(optimizer, vectors(66))  # 64 is a step that may
    fit(optimizer, vectors(33), squares)
    assert optimizer.logs()["skipped"] == 33
    with pytest.warns(UserWarning, match="a batch gets no penalty"):
        fit(optimizer, vectors(1), squares)  # the hundredth
    assert optimizer.logs()["skipped"] == 34


@pytest.mark.guard
@pytest.mark.parametrize("comes_first", [False, True])
@EACH
def test_a_loss_of_another_forward_pass_that_is_not_read_is_skipped_beside_one_that_is(variant, comes_first):
    """Virtual adversarial training: the cross-entropy has its penalty, and the consistency loss has none."""
    model = mlp()
    optimizer = wrap(variant, model)
    fit(optimizer, vectors(2))
    for step, (x, y) in enumerate(vectors(25)):
        optimizer.zero_grad()
        inputs = (x + 0.1, x) if comes_first else (x, x + 0.1)
        outputs = [model(one) for one in inputs]
        near, z = outputs if comes_first else reversed(outputs)
        loss = F.cross_entropy(z, y) + near.square().mean()
        with pytest.warns(UserWarning, match="a batch gets no penalty") if step == 0 else nullcontext():
            loss.backward()
        optimizer.step()
        assert optimizer.logs()["penalty"] > 0
    assert optimizer.logs()["skipped"] == 25


# ---- the number of classes, and their dimension ----------------------------------------------------------------------


class Given(nn.Module):
    """Returns its parameter, of any shape."""

    def __init__(self, shape):
        super().__init__()
        self.z = nn.Parameter(torch.randn(shape).double())

    def forward(self):
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
    k = int(y[0])
    assert_same(optimizer.prototypes[k], rows.detach()[y == k].mean(0), rtol=1e-12)


@GOES_ON_BY_THE_TERM
@pytest.mark.parametrize("distance", ["kl", "infonce"])
def test_dcl_finds_the_dimension_of_the_classes_which_its_term_then_takes(distance):
    """As of a model that returns the rows themselves."""
    found = []
    for flat in (False, True):
        last = [nn.Flatten(0, 1)] if flat else []
        model, companion = mlp().extend(last), mlp(seed=3).extend(last)
        optimizer = wrap("dcl", model, distance=distance, companion=companion)
        for step, (x, y) in enumerate(sequences(5)):
            optimizer.zero_grad()
            z = model(x)
            loss = (
                F.cross_entropy(z.flatten(0, -2), y.flatten()) if step < 3 else z.square().mean() + optimizer.penalty(z)
            )
            loss.backward()
            optimizer.step()
        found.append(optimizer)
    assert_same_training(*found, **CLOSE)


@pytest.mark.parametrize("first", ["ignored", "not finite"])
@pytest.mark.parametrize("num_classes", [None, CLASSES])
def test_the_dimension_is_not_final_before_some_rows_had_labels(first, num_classes):
    """Such a batch does not say which dimension holds the classes: the next one was an error about time as K."""
    model = mlp()
    optimizer = wrap("dcp", model, num_classes=num_classes)
    (x, y), *rest = sequences(3)
    if first == "ignored":
        F.cross_entropy(model(x).flatten(0, 1), torch.full_like(y, -100).flatten(), reduction="sum").backward()
        optimizer.step()
    else:
        (of_tokens(model(x), y) * torch.inf).backward()
        optimizer.zero_grad()
    assert not optimizer.prototypes.any()
    fit(optimizer, rest, of_tokens)
    assert optimizer.prototypes.shape == (CLASSES, CLASSES)
    assert optimizer.prototypes.any(1).all()


# ---- without a synchronization ---------------------------------------------------------------------------------------


class NothingRead(TorchDispatchMode):
    """Raises where the host would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        masked = "index_put" in name or name.startswith("aten::index.")
        masks = masked and any(index is not None and index.dtype == torch.bool for index in args[1])
        if masks or any(part in name for part in ("_local_scalar_dense", "nonzero", "aten::equal", "unique")):
            raise AssertionError(f"{func} synchronizes")
        return func(*args, **(kwargs or {}))


class NoFloat64(TorchDispatchMode):
    """Raises where a float64 tensor is made of float32 ones, as Apple's MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                raise TypeError(f"{func} makes a float64 tensor")
        return result


@EACH_WAY
@EACH
def test_devices_without_float64_can_train(variant, way):
    optimizer = wrap(variant, mlp().float())
    data = [(x.float(), y) for x, y in vectors(5)]
    with NoFloat64():
        train_by(optimizer, data, way, F.cross_entropy)
    assert optimizer.logs()["penalty"] > 0


def train_silently(model, optimizer, data, loss):
    """The plain loop, in which no value may be read after the loss is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synchronization, "may_sync", lambda step, tensor: False)
        patch.setattr(synchronization, "is_sync_step", lambda step: False)
        for x, y in data:
            optimizer.zero_grad()
            value = loss(model(x), y)
            with NothingRead():
                value.backward()
                optimizer.step()


def short(count=12):
    """The later batches have 2 or 3 rows."""
    return [
        (x[: 2 + step % 2], y[: 2 + step % 2]) if step > 4 else (x, y) for step, (x, y) in enumerate(vectors(count))
    ]


def certain_of_wrong_classes():
    """Labels are wrong where the loss's factor is guessed too high."""
    model = mlp()
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(5.0)
    return model


SILENTLY = {name: script for name, script in SCRIPTS.items() if name not in ("bfloat16", "(N, K, H, W), ignored")}
SILENTLY["short batches"] = Script(F.cross_entropy, data=short)
SILENTLY["short batches, label smoothing"] = Script(smoothed, model=certain_of_wrong_classes, data=short)


@EACH
@pytest.mark.parametrize("name", SILENTLY)
def test_without_synchronization_a_training_is_the_same(name, variant):
    script = SILENTLY[name]
    results = []
    for silent in (False, True):
        model = script.model()
        optimizer = wrap(variant, model)
        data = script.data()
        fit(optimizer, data[:2], script.loss)
        (train_silently if silent else train)(model, optimizer, data[2:], script.loss)
        results.append((model.state_dict(), learned(optimizer), optimizer.state_dict()["state"]))
    assert_same(*results, **NEAR)


@pytest.mark.parametrize(("variant", "options"), [("dcp", {}), ("dcl", {"distance": "kl"})])
def test_a_resumed_run_knows_form_and_dimension_where_no_value_may_be_read(variant, options):
    def loss(z, y):
        return smoothed(z.flatten(0, 1), y.flatten())

    model = mlp()
    optimizer = wrap(variant, model, **options)
    fit(optimizer, sequences(2), loss)
    second = resumed(optimizer, variant, **options)
    for each in (optimizer, second):
        train_silently(each.model, each, sequences(4)[2:], loss)
    assert_same_training(optimizer, second)


@pytest.mark.filterwarnings("ignore:a batch gets no penalty")
@EACH
@pytest.mark.parametrize("batch", ["zero", "unreadable", "other factor"])
def test_without_synchronization_a_batch_that_is_unlike_the_others(batch, variant):
    """A gradient of zero and an unreadable one get no penalty; a factor may jump, as a scaler's does."""
    other = {"zero": lambda z, y: 0 * z.sum(), "unreadable": squares}.get(batch, F.cross_entropy)
    results = []
    for silent in (False, True):
        model = mlp()
        optimizer = wrap(variant, model)
        for step, data in enumerate(batches(8)):
            factor = 64.0 if batch == "other factor" and step >= 5 else 1.0
            loss = other if step == 5 else F.cross_entropy
            run = train_silently if silent and step > 1 else train
            run(model, optimizer, [data], lambda z, y, loss=loss, factor=factor: factor * loss(z, y))
            results.append(optimizer.logs()["penalty"])
        results.append((model.state_dict(), learned(optimizer)))
    first, second = results[:9], results[9:]
    if batch != "other factor":
        assert math.isnan(first.pop(5))
        assert math.isnan(second.pop(5))
        if variant == "dcl":  # the companion's momentum moves on where the step did not wait
            first, second = first[:5], second[:5]
    assert first[:-1] == pytest.approx(second[:-1], rel=1e-9, nan_ok=True)
    assert_same(first[-1:], second[-1:], **NEAR)


@pytest.mark.filterwarnings("ignore:a batch gets no penalty")
def test_the_companions_graph_of_an_unreadable_batch_is_freed_by_the_step():
    model = mlp()
    optimizer = wrap("dcl", model)
    fit(optimizer, batches(2))
    forwards = training_forwards(optimizer)
    x, y = one()
    z = model(x)
    graph = weakref.ref(forwards[-1]().prediction.logits)
    squares(z, y).backward(retain_graph=True)
    assert graph() is not None
    optimizer.step()
    assert graph() is None
    assert z.grad_fn is not None


# ---- a head of zeros -------------------------------------------------------------------------------------------------


def test_two_classes_a_pixel_are_not_refused_while_the_head_is_zero():
    model = nn.Conv2d(3, 2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = DCPOptimizer(sgd(model), model)
    fit(optimizer, [(torch.randn(4, 3, 8, 8), torch.arange(256).reshape(4, 8, 8) % 2)] * 3)
    assert optimizer.prototypes.any(1).all()
