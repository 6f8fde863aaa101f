"""Labels, their number and their dimension, read off the loss's gradient: equal to given ones, or refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.hooks.cross_entropy import find_class_dim, read_cross_entropy
from tests.helpers import CLASSES, FEATURES, assert_same, batches, cells, mlp, sgd, train, unreadable_device

Loss = Callable[[Tensor, Tensor], Tensor]


def some_ignored(y: Tensor) -> Tensor:
    return y.where(torch.arange(y.numel()).reshape(y.shape) % 3 != 1, -100)


def focal(z: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(z, 1).gather(1, y[:, None])
    return ((1 - p) ** 2 * -p.log()).mean()


def averaged_by_sequence(z: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(z, y, reduction="none") / (1 + torch.arange(len(z)) % 5).to(z)).mean()


CROSS_ENTROPIES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "a quarter": lambda z, y: F.cross_entropy(z, y) / 4,
    "class weights": lambda z, y: F.cross_entropy(z, y, weight=torch.linspace(0.2, 3, z.shape[1]).to(z)),
    "focal": focal,
    "averaged by sequence": averaged_by_sequence,
    "ignored rows": lambda z, y: F.cross_entropy(z, some_ignored(y)),
    "label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "label smoothing, ignored rows": lambda z, y: F.cross_entropy(z, some_ignored(y), label_smoothing=0.2),
    "nll of log_softmax": lambda z, y: F.nll_loss(F.log_softmax(z, 1), y),
}


def read(loss: Loss, z: Tensor, y: Tensor) -> Any:
    z = z.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(z.float() if z.dtype.itemsize == 2 else z, y), z)
    return read_cross_entropy(z.detach(), gradient)


def expected(name: str, y: Tensor, classes: int) -> Tensor:
    return some_ignored(y).where(some_ignored(y) >= 0, classes) if "ignored" in name else y


# ---- the labels ------------------------------------------------------------------------------------------------------


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("name", "dtype"),
    cells(
        itertools.product(CROSS_ENTROPIES, DTYPES),
        *zip(CROSS_ENTROPIES, itertools.cycle(DTYPES), strict=False),
        ("mean", torch.float16),
        ("focal", torch.float16),
    ),
)
@settings(max_examples=12)
@given(
    classes=st.sampled_from([3, 10, 100]),
    rows=st.integers(4, 40),
    spread=st.floats(0.5, 4.0),
    learned=st.floats(0.0, 6.0),
    seed=st.integers(0, 10_000),
)
def test_labels_are_read_exactly(name, dtype, classes, rows, spread, learned, seed):
    """``learned`` is what the label's logit has gained; in float16 the loss is scaled as a gradient scaler does."""
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(rows, classes, generator=generator), torch.randint(classes, (rows,), generator=generator)
    z = (z * spread + learned * F.one_hot(y, classes)).to(dtype)
    factor = 2.0**14 if dtype == torch.float16 else 1.0
    reading = read(lambda z, y: factor * CROSS_ENTROPIES[name](z, y), z, y)
    right = expected(name, y, classes)
    # A row may stay unread, as smoothed ones of few classes and rows, or where its gradient is lost in float16; none
    # gets another label.
    assert ((reading.labels == right) | (reading.labels == classes)).all()
    if "smoothing" not in name and (name, dtype) != ("focal", torch.float16):
        assert bool(reading.readable)
        assert torch.equal(reading.labels, right)


@pytest.mark.parametrize(
    ("classes", "learned"),
    cells(itertools.product([3, 10, 1000], [0.0, 3.0, 6.0]), (3, 6.0), (10, 0.0), (1000, 3.0)),
)
def test_smoothed_labels_are_read_also_where_the_target_is_overconfident(classes, learned):
    torch.manual_seed(0)
    y = torch.randint(classes, (64,))
    z = torch.randn(64, classes, dtype=torch.float64) + learned * F.one_hot(y, classes)
    reading = read(lambda z, y: 3 * F.cross_entropy(z, y, label_smoothing=0.1), z, y)
    assert torch.equal(reading.labels, y)
    assert reading.scale == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize(
    ("classes", "spread"),
    cells(
        itertools.product([3, 10, 1000], [0.0, 0.02, 0.05, 0.1, 0.2, 0.5]),
        (3, 0.0),
        (10, 0.1),
        (1000, 0.02),
        (1000, 0.5),
    ),
)
def test_smoothed_labels_in_bfloat16_are_read_from_the_first_batch(classes, spread):
    """Where a fresh model's logits differ a little: enough for the form, little beside the rounding of the rest."""
    torch.manual_seed(0)
    z, y = (torch.randn(64, classes) * spread).bfloat16(), torch.randint(classes, (64,))
    reading = read(lambda z, y: F.cross_entropy(z.float(), y, label_smoothing=0.1), z, y)
    assert torch.equal(reading.labels, y)


@pytest.mark.parametrize(
    ("smoothing", "classes", "spread"),
    cells(
        itertools.product([0.0, 0.1], [10, 1000, 20_000], [0.0, 0.1, 1.0, 3.0]),
        *((0.0, 10, 0.0), (0.0, 20_000, 3.0), (0.1, 1000, 1.0), (0.1, 20_000, 0.1)),
    ),
)
def test_labels_of_a_loss_in_bfloat16_itself_are_read(smoothing, classes, spread):
    """Its log-probabilities are rounded, which moves the probabilities of many classes by per cents."""
    torch.manual_seed(0)
    z, y = (torch.randn(16, classes) * spread).bfloat16(), torch.randint(classes, (16,))
    reading = read(lambda z, y: F.cross_entropy(z, y, label_smoothing=smoothing), z, y)
    assert torch.equal(reading.labels, y)


@pytest.mark.parametrize(
    ("name", "spread"),
    cells(
        itertools.product(["mean", "class weights", "focal", "label smoothing"], [0.1, 1.0, 4.0]),
        *(("mean", 4.0), ("class weights", 0.1), ("focal", 1.0), ("focal", 4.0), ("label smoothing", 1.0)),
    ),
)
def test_two_classes(name, spread):
    torch.manual_seed(1)
    z, y = torch.randn(64, 2) * spread, torch.randint(2, (64,))
    reading = read(CROSS_ENTROPIES[name], z, y)
    unlikely = F.softmax(z, 1).gather(1, y[:, None])[:, 0] < 0.2
    right = y.where(~unlikely, 2) if name == "focal" else y  # of a focal loss some may be the other class's, smoothed
    assert torch.equal(reading.labels, right)
    assert bool(reading.readable)


@pytest.mark.parametrize(
    ("smoothing", "learned", "rows"),
    cells(
        itertools.product([0.1, 0.2], [2.0, 3.5, 6.0], [1, 2, 3, 4, 6, 8, 16]),
        *((0.1, 3.5, 1), (0.1, 2.0, 2), (0.2, 6.0, 3), (0.2, 3.5, 6), (0.1, 6.0, 16)),
    ),
)
def test_smoothed_labels_of_two_classes_are_never_taken_for_the_other_class(smoothing, learned, rows):
    """Overconfident ones have the sign of the other class; so has a label that the model thinks unlikely."""
    wrong = 0
    for seed in range(100):
        torch.manual_seed(seed)
        y = torch.randint(2, (rows,))
        z = torch.randn(rows, 2) + learned * F.one_hot(y, 2)
        labels = read(lambda z, y: F.cross_entropy(z, y, label_smoothing=smoothing), z, y).labels
        wrong += int(((labels != y) & (labels != 2)).sum())
    assert wrong <= (1 if rows == 2 else 0)  # of two rows, two slopes may be the same by chance


@pytest.mark.parametrize(
    ("rows", "scale"),
    cells(itertools.product([1, 2, 4, 32], [1.0, 5.0, 20.0]), (1, 20.0), (2, 5.0), (4, 1.0), (32, 20.0)),
)
def test_two_classes_of_any_beginning_are_readable(rows, scale):
    """Confidently wrong predictions of a fresh model are no reason to refuse its cross-entropy."""
    for seed in range(50):
        torch.manual_seed(seed)
        y = torch.randint(2, (rows,))
        reading = read(F.cross_entropy, scale * torch.randn(rows, 2), y)
        assert bool(reading.readable)
        assert ((reading.labels == y) | (reading.labels == 2)).all()


def test_a_sure_row_has_the_label_that_it_is_sure_of():
    # The third is sure, and wrong; the last has a gradient of zero at the label and at a class that is out of reach.
    z = torch.tensor([[40.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.0, 30.0, 0.0], [-200.0, 60.0, 0.0]])
    y = torch.tensor([0, 1, 0, 1])
    reading = read(F.cross_entropy, z, y)
    assert torch.equal(reading.labels, y)


def test_a_row_whose_gradient_vanishes_has_no_label_since_it_may_be_an_ignored_one():
    z = torch.tensor([[60.0, 0.0, 0.0], [0.0, 1.0, 0.5]], dtype=torch.float16)
    assert read(F.cross_entropy, z, torch.tensor([0, 1])).labels.tolist() == [3, 1]


def binary(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z))


def mixed(z: Tensor, y: Tensor) -> Tensor:
    return 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))


OTHERS: dict[str, Loss] = {
    "binary": binary,
    "mse": lambda z, y: F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z)),
    "mixup": mixed,
    "mixup, smoothed": lambda z, y: (
        0.7 * F.cross_entropy(z, y, label_smoothing=0.1) + 0.3 * F.cross_entropy(z, y.flip(0), label_smoothing=0.1)
    ),
    "distillation": lambda z, y: F.cross_entropy(z, F.softmax(z.detach().flip(0), 1)),
    "negated": lambda z, y: -F.cross_entropy(z, y),
    "advantages": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.linspace(-1, 1, len(y))).mean(),
    "with a logit penalty": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "nll of logits": F.nll_loss,
}


@pytest.mark.parametrize(
    ("name", "classes"),
    cells(itertools.product(OTHERS, [2, 10]), *((name, 10) for name in OTHERS), ("binary", 2), ("distillation", 2)),
)
def test_the_gradients_of_other_losses_have_no_labels(name, classes):
    torch.manual_seed(0)
    reading = read(OTHERS[name], 2 * torch.randn(32, classes), torch.randint(classes, (32,)))
    assert not bool(reading.readable)
    assert not reading.has_scale
    assert (reading.labels == classes).all()


@pytest.mark.parametrize(
    ("classes", "bias", "loss", "rows"),
    cells(
        itertools.product([3, 100], [-4.6, 0.0], ["binary", "mse"], [1, 2, 16]),
        *((3, -4.6, "binary", 1), (100, -4.6, "mse", 16), (100, 0.0, "binary", 2), (3, 0.0, "mse", 1)),
    ),
)
def test_a_prior_bias_and_tiny_batches_pass_for_no_cross_entropy(classes, bias, loss, rows):
    """A head that begins at the classes' prior probability, as detection heads do: the scale was read as .01."""
    torch.manual_seed(2)
    reading = read(OTHERS[loss], bias + 0.5 * torch.randn(rows, classes), torch.randint(classes, (rows,)))
    assert (reading.scale, bool(reading.has_scale)) == (1.0, False)


# ---- a training with what is read, and with what is given ------------------------------------------------------------


def images(classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, classes, 1)).double()


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


class LogProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.body(x), 1)


def in_bfloat16(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.float(), y)


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], list[Any], Loss, int]] = {
    **{name: (mlp, vectors(), loss, 1) for name, loss in CROSS_ENTROPIES.items()},
    "log-probabilities": (LogProbabilities, vectors(), F.nll_loss, 1),
    "log-probabilities, class weights": (
        LogProbabilities,
        vectors(),
        lambda z, y: F.nll_loss(z, y, weight=torch.linspace(0.2, 3, CLASSES).to(z)),
        1,
    ),
    "(N, K, H, W)": (images, dense(), F.cross_entropy, 1),
    "(N, K, H, W), ignored": (images, dense(), lambda z, y: F.cross_entropy(z, some_ignored(y)), 1),
    "(batch, time, classes)": (mlp, sequences(), of_tokens, -1),
    "bfloat16": (lambda: mlp(dtype=torch.bfloat16), [(x.bfloat16(), y) for x, y in vectors()], in_bfloat16, 1),
}


BEYOND_THE_LABELS = [name for name in SCRIPTS if name not in CROSS_ENTROPIES]  # which are read above


@pytest.mark.parametrize("script", cells(SCRIPTS, "mean", "label smoothing, ignored rows", *BEYOND_THE_LABELS))
def test_what_is_read_equals_what_is_given_bit_for_bit(script):
    build, data, loss, class_dim = SCRIPTS[script]
    models = [build(), build()]
    reading = DCPOptimizer(sgd(models[0]), models[0], weight=1.0)
    given = DCPOptimizer(sgd(models[1]), models[1], CLASSES, weight=1.0, class_dim=class_dim)
    for x, y in data:
        reading.zero_grad()
        loss(models[0](x), y).backward()
        reading.step()
        given.zero_grad()
        given.set_targets(some_ignored(y) if "ignored" in script or loss is of_tokens else y)
        loss(models[1](x), y).backward()
        given.step()
    assert_same(models[0], models[1], rtol=0, atol=0)
    assert torch.equal(reading.prototypes, given.prototypes)
    assert reading.prototypes.abs().sum() > 0
    assert reading.logs() == given.logs()


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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        z = model(x)
        z.retain_grad()
        optimizer.zero_grad()
        F.cross_entropy(z, y, label_smoothing=smoothing).backward()
        optimizer.step()
        assert torch.equal(read_cross_entropy(z.detach(), z.grad).labels, y)
    assert z.argmax(1).equal(y)


# ---- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["binary", "mse", "mixup"])
def test_an_unreadable_loss_is_refused_at_the_first_step_before_anything_changes(name):
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    x, y = vectors(1)[0]
    loss = OTHERS[name](model(x), y)
    with pytest.raises(RuntimeError, match=r"(?s)labels of this batch cannot be read.*set_targets.*targets="):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.forecaster.seen.any()


def test_later_batches_that_cannot_be_read_take_no_part_and_a_warning_says_so_once():
    models = [mlp(), mlp()]
    optimizer, plain = DCPOptimizer(sgd(models[0]), models[0], weight=1.0), sgd(models[1])
    first, *rest = vectors(4)
    train(models[0], optimizer, [first])
    models[1].load_state_dict(models[0].state_dict())
    plain.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    before = optimizer.prototypes
    with pytest.warns(UserWarning, match=r"cannot be read.*such batches take no part") as caught:
        train(models[0], optimizer, rest, mixed)
    assert len(caught) == 1
    train(models[1], plain, rest, mixed)
    assert_same(models[0], models[1], rtol=0, atol=0)
    assert torch.equal(optimizer.prototypes, before)


def test_a_single_row_that_cannot_be_read_takes_no_part():
    """Its prototypes are those of the batch without it, to the rounding of the mean."""
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, weight=0.0)
    x, y = torch.randn(20, FEATURES, dtype=torch.float64), torch.arange(20) % CLASSES

    def one_mixed(z: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(z, y, reduction="none")
        return (losses.sum() + F.cross_entropy(z[:1], y[:1] + 1)) / len(losses)

    z = model(x)
    one_mixed(z, y).backward()
    optimizer.step()
    means = torch.stack([z.detach()[1:][y[1:] == k].mean(0) for k in range(CLASSES)])
    assert_same(optimizer.prototypes, means, rtol=1e-12)


def test_a_batch_whose_rows_are_all_ignored_is_no_reason_for_an_error():
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    x, y = vectors(1)[0]
    F.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum").backward()
    optimizer.step()
    assert not optimizer.forecaster.seen.any()
    train(model, optimizer, vectors(2))
    assert optimizer.forecaster.seen.any()


# ---- given arguments win ---------------------------------------------------------------------------------------------


def test_labels_that_are_given_outrank_those_that_could_be_read():
    model = mlp()
    optimizer = DCPOptimizer(
        sgd(model), model, targets=lambda args, kwargs: torch.zeros(len(args[0]), dtype=torch.long)
    )
    train(model, optimizer, vectors(2))
    assert optimizer.forecaster.seen.tolist() == [True] + [False] * (CLASSES - 1)


def test_a_label_that_is_to_be_ignored_is_although_the_loss_does_not():
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, ignore_index=0)
    train(model, optimizer, vectors(6))
    assert optimizer.forecaster.seen.tolist() == [False] + [True] * (CLASSES - 1)


def test_a_number_of_classes_that_the_logits_do_not_have_is_an_error():
    model = mlp()
    _optimizer = DCPOptimizer(sgd(model), model, CLASSES + 1)  # whose hooks go with it
    x, y = vectors(1)[0]
    with pytest.raises(ValueError, match=rf"num_classes={CLASSES + 1} but the model gives {CLASSES} logits"):
        F.cross_entropy(model(x), y).backward()


# ---- the class dimension ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 5, 6), 1), ((4, 5, 6), 2), ((2, 5, 3, 4), 1), ((2, 3, 4, 5), 3), ((2, 2, 2), 2)]
)
def test_the_dimension_along_which_the_gradient_is_a_cross_entropys(shape, dim):
    torch.manual_seed(0)
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    rows = z.movedim(dim, -1).flatten(0, -2)
    (gradient,) = torch.autograd.grad(F.cross_entropy(rows, torch.randint(rows.shape[1], (len(rows),))), z)
    assert find_class_dim(z.detach(), gradient) == dim
    assert find_class_dim(z.detach(), torch.randn(shape)) is None


@pytest.mark.parametrize("distance", ["kl", "infonce"])
def test_dcl_finds_the_dimension_of_the_classes(distance):
    trained = []
    for class_dim in (None, -1):
        model = mlp()
        options = {"distance": distance, "class_dim": class_dim, "companion": mlp(seed=3)}
        train(model, DCLOptimizer(sgd(model), model, weight=1.0, **options), sequences(5), of_tokens)
        trained.append(model)
    assert_same(*trained, rtol=0, atol=0)


def test_a_dimension_that_is_given_wins():
    trained = []
    for class_dim in (None, 1):
        model = mlp()
        options = {"distance": "kl", "class_dim": class_dim, "companion": mlp(seed=3)}
        train(model, DCLOptimizer(sgd(model), model, weight=1.0, **options), sequences(5), of_tokens)
        trained.append(model)
    with pytest.raises(AssertionError):
        assert_same(*trained)


def test_where_no_dimension_is_found_the_first_is_taken_and_those_that_it_matters_for_say_so():
    for distance, warns in (("mse", False), ("kl", True)):
        model, criterion = mlp(), nn.MSELoss()
        _optimizer = DCLOptimizer(sgd(model), model, distance=distance, loss_scale=1.0)
        x, _ = sequences(1)[0]
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                criterion(model(x), torch.zeros(4, 6, CLASSES).double()).backward()
            assert [("class_dim" in str(w.message)) for w in caught] == [True] * warns
            warns = False


# ---- the number of classes -------------------------------------------------------------------------------------------


def test_prototypes_are_created_by_the_first_backward():
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    assert optimizer.prototypes.shape == (0, 0)
    train(model, optimizer, vectors(1))
    assert optimizer.prototypes.shape == (CLASSES, CLASSES)


@pytest.mark.parametrize(
    ("copied", "steps"),
    cells(
        itertools.product(["state_dict", "deepcopy", "pickle"], [0, 3]),
        *(("state_dict", 0), ("state_dict", 3), ("deepcopy", 3), ("pickle", 0)),
    ),
)
def test_a_run_that_was_resumed_equals_one_that_was_not(steps, copied):
    data = vectors(8)
    model = mlp()
    optimizer = DCPOptimizer(sgd(model, momentum=0.9), model, weight=1.0)
    train(model, optimizer, data[:steps])
    if copied == "state_dict":
        second = mlp(seed=1)
        resumed = DCPOptimizer(sgd(second, momentum=0.9), second, weight=1.0)
        second.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        second, resumed = (
            copy.deepcopy((model, optimizer))
            if copied == "deepcopy"
            else pickle.loads(pickle.dumps((model, optimizer)))
        )
    train(model, optimizer, data[steps:])
    train(second, resumed, data[steps:])
    assert_same(model, second, rtol=0, atol=0)
    assert torch.equal(optimizer.prototypes, resumed.prototypes)


def test_a_state_of_another_number_of_classes_is_refused_where_the_number_was_given():
    model, other = mlp(), nn.Linear(FEATURES, 3).double()
    optimizer, second = DCPOptimizer(sgd(model), model, CLASSES), DCPOptimizer(sgd(other), other, 3)
    with pytest.raises(ValueError, match="prototypes has shape"):
        optimizer.forecaster.check_state(second.forecaster.state_dict())


@pytest.mark.parametrize("first", ["ignored", "not finite"])
def test_the_number_of_classes_is_not_final_before_some_rows_had_labels(first):
    """Such a batch does not say which dimension holds the classes: the next one was an error about time as K."""
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    (x, y), *rest = sequences(3)
    if first == "ignored":
        F.cross_entropy(model(x).flatten(0, 1), torch.full_like(y, -100).flatten(), reduction="sum").backward()
        optimizer.step()
    else:
        (of_tokens(model(x), y) * torch.inf).backward()
        optimizer.zero_grad()
    train(model, optimizer, rest, of_tokens)
    assert optimizer.prototypes.shape == (CLASSES, CLASSES)
    assert optimizer.forecaster.seen.all()


def test_too_many_classes_are_refused_at_the_first_backward():
    model = nn.Linear(1, 20_000)
    optimizer = DCPOptimizer(sgd(model), model)
    with pytest.raises(ValueError, match=r"num_classes=20000.*limit 1 GiB.; use DCLOptimizer"):
        F.cross_entropy(model(torch.randn(2, 1)), torch.tensor([0, 1])).backward()
    assert not optimizer.forecaster.seen.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_is_not_asked_once_labels_have_been_read(dtype):
    with unreadable_device():
        model = nn.Linear(FEATURES, CLASSES, dtype=dtype)
        optimizer = DCPOptimizer(sgd(model), model)
        optimizer._regularizer.labels._has_read = True
        optimizer._regularizer.steps = 1
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, FEATURES, dtype=dtype)), torch.randint(CLASSES, (16,))).backward()
            optimizer.step()
    assert optimizer.prototypes.device.type == "meta"


def resumed(optimizer: Any, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    again = copy.deepcopy(model)
    second = type(optimizer)(sgd(again), again, weight=1.0, **options)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again, second


def test_a_batch_that_cannot_be_read_is_no_error_after_a_resumption_either():
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, weight=1.0)
    first, second = vectors(2)
    train(model, optimizer, [first])
    for net, wrapped in ((model, optimizer), resumed(optimizer, model)):
        with pytest.warns(UserWarning, match="such batches take no part"):
            train(net, wrapped, [second], mixed)


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
    assert_same(model, again, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_a_single_logit_is_refused(shape):
    model = nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0) if len(shape) == 1 else nn.Identity())
    optimizer = DCPOptimizer(sgd(model), model)
    with pytest.raises(RuntimeError, match="labels of this batch cannot be read"):
        F.binary_cross_entropy_with_logits(model(torch.randn(8, FEATURES)), torch.ones(shape)).backward()
    assert optimizer.logs()["step"] == 0


@pytest.mark.parametrize(
    ("classes", "learned"),
    cells(itertools.product([2, 3, 10, 100], [2.0, 5.0, 7.0]), (2, 7.0), (3, 2.0), (10, 5.0), (100, 7.0)),
)
def test_a_cross_entropy_in_bfloat16_itself_is_readable_of_confident_predictions(classes, learned):
    """It takes 1 off probabilities that are rounded to bfloat16."""
    for seed in range(20):
        torch.manual_seed(seed)
        y = torch.randint(classes, (32,))
        z = (torch.randn(32, classes) + learned * F.one_hot(y, classes)).bfloat16().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(z, y), z)
        reading = read_cross_entropy(z.detach(), gradient)
        assert bool(reading.readable)
        assert ((reading.labels == y) | (reading.labels == classes)).all()


def test_a_number_of_classes_that_is_given_waits_for_the_dimension_too():
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=1.0)
    train(model, optimizer, sequences(1), lambda z, y: 0 * z.sum())  # all ignored: nothing tells the dimension
    assert not optimizer.forecaster.seen.any()
    train(model, optimizer, sequences(2), of_tokens)
    assert optimizer.forecaster.seen.all()
