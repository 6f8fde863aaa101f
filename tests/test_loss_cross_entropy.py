"""Labels and loss scale, read off gradients: by hand, of random losses, and of losses that are no cross-entropies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim.loss import cross_entropy
from dcl_optim.loss.cross_entropy import Evidence, Form, Reading, candidates, examine, read, tolerance_of
from tests.helpers import assert_same, cells


def gradient(loss: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(loss, z)[0]


def settle(z: Tensor, g: Tensor, former: Form | None = None) -> tuple[Form | None, Reading | None]:
    """The form that a gradient has, and the reading by it; no reading if the gradient has no known form.

    Raises:
        Uncertain: the gradient does not tell the forms apart.
    """
    tolerance = tolerance_of(z.dtype, g.dtype)
    z, g = (t.detach().float() if t.dtype.itemsize < 4 else t.detach() for t in (z, g))
    evidence = Evidence(*examine(z, g, tolerance).tolist())
    if not evidence.says:
        raise Uncertain
    live = g.abs().amax(1) > 0
    for _, form in candidates(evidence, z.shape[1], former, allows_negative=False):
        reading = read(form, z, g, live, live.sum(), tolerance)
        if reading.fits:
            return form, reading
    return None, None


class Uncertain(Exception):
    """Such a batch is skipped, and the next one is asked."""


def labels_of(reading: Reading, classes: int) -> Tensor:
    """The label of each row, ``classes`` for none; of soft labels the class with the largest share."""
    labels = reading.labels
    return labels if labels.ndim == 1 else labels.argmax(1).where(labels.sum(1) > 0, classes)


# ---- by hand ---------------------------------------------------------------------------------------------------------

P = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25]], dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 2])
E = F.one_hot(Y, 3).double()
ALL = torch.ones(4, dtype=torch.bool)
FOUR = torch.tensor(4)


def by_hand(form: Form, g: Tensor, *, z: Tensor | None = None, live: Tensor = ALL, count: int = 4):
    return read(form, P.log() if z is None else z, g, live, torch.tensor(count))


def test_hard_labels_by_hand():
    """A mean over four rows that is multiplied by 8 has g = 8/4 (p - e_y)."""
    labels, scale, fits, tells = by_hand(Form("hard"), 2.0 * (P - E))
    assert torch.equal(labels, Y)
    assert float(scale) == pytest.approx(8.0, rel=1e-12)
    assert (bool(fits), bool(tells)) == (True, True)


def test_a_row_whose_gradient_is_zero_has_no_label_and_does_not_count():
    live = torch.tensor([True, True, False, True])
    labels, scale, fits, _ = by_hand(Form("hard"), 2.0 * (P - E) * live[:, None], live=live, count=3)
    assert labels.tolist() == [0, 1, 3, 2]
    assert float(scale) == pytest.approx(6.0, rel=1e-12)
    assert bool(fits)


@pytest.mark.parametrize("kind", ["hard", "weighted", "soft", "log"])
def test_rows_that_are_a_selection_stand_for_all(kind):
    """The scale is that of ``count`` rows."""
    z, q = torch.randn(4, 6).double().log_softmax(1), F.one_hot(torch.tensor([0, 1, 0, 5]), 6).double()
    g = -2.0 * q if kind == "log" else 2.0 * (z.exp() - q)
    assert float(by_hand(Form(kind), g, z=z, count=40).scale) == pytest.approx(80.0, rel=1e-9)


def test_hard_labels_with_a_smoothing_by_hand():
    """Also of a row that is surer than its target, whose lowest entry of g is another class."""
    p = torch.tensor([[0.98, 0.015, 0.005], *P[1:].tolist()]).double()
    g = 2.0 * (p - (0.9 * E + 0.1 / 3))
    assert g.argmin(1).tolist() != Y.tolist()
    labels, scale, fits, _ = by_hand(Form("hard", 0.1), g, z=p.log())
    assert torch.equal(labels, Y)
    assert float(scale) == pytest.approx(8.0, rel=1e-7)
    assert bool(fits)


def test_each_weighted_row_has_its_own_factor():
    factors = torch.tensor([0.5, 3.0, 2.0, 1.25]).double()
    labels, scale, fits, tells = by_hand(Form("weighted"), factors[:, None] * (P - E))
    assert torch.equal(labels, Y)
    assert float(scale) == pytest.approx(6.75, rel=1e-12)
    assert (bool(fits), bool(tells)) == (True, True)


@pytest.mark.parametrize(("wrong", "fits"), [(1, True), (2, False)])
def test_a_weighted_row_on_no_line_has_no_label_and_three_of_four_have_to_be_on_one(wrong, fits):
    g = P - E
    g[:wrong] = torch.tensor([-0.4, 0.1, 0.3])
    reading = by_hand(Form("weighted"), g)
    assert bool(reading.fits) == fits
    assert reading.labels.tolist() == ([3, 1, 0, 2] if fits else [3] * 4)


def test_soft_labels_by_hand():
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(4, 6).double(), 1)
    q = torch.zeros(4, 6).double()
    q[range(4), [0, 1, 0, 2]] += torch.tensor([0.7, 1.0, 0.5, 0.4]).double()
    q[range(4), [3, 4, 5, 1]] += torch.tensor([0.3, 0.0, 0.5, 0.6]).double()
    for smoothing in (0.0, 0.1):
        g = 2.0 * (p - ((1 - smoothing) * q + smoothing / 6))
        labels, scale, fits, tells = by_hand(Form("soft", smoothing), g, z=p.log())
        assert_same(labels, q, atol=1e-12)
        assert float(scale) == pytest.approx(8.0, rel=1e-9)
        assert (bool(fits), bool(tells)) == (True, True)


def test_a_share_below_zero_is_of_another_loss():
    torch.manual_seed(0)
    p, q = torch.softmax(torch.randn(4, 6).double(), 1), F.one_hot(Y, 6).double()
    q[0, 0], q[0, 5] = 1.3, -0.3
    reading = by_hand(Form("soft"), 2.0 * (p - q), z=p.log())
    assert not reading.fits
    assert (reading.labels == 0).all()


def test_log_probabilities_by_hand():
    """g = -a e_y; with class weights each row has its own a."""
    factors = torch.tensor([0.5, 3.0, 2.0, 1.25]).double()
    labels, scale, fits, tells = by_hand(Form("log"), -factors[:, None] * E)
    assert torch.equal(labels, Y)
    assert float(scale) == pytest.approx(6.75, rel=1e-12)
    assert (bool(fits), bool(tells)) == (True, True)
    assert not by_hand(Form("log"), -E, z=P.log() + 1.0).fits, "the model's output is no log-probability"


def test_the_only_negative_entry_by_hand():
    g = torch.tensor([[-0.5, 0.4, 0.3], [0.1, -0.9, 0.2], [-0.1, 0.0, 0.0], [-0.1, -0.1, 0.3]]).double()
    labels, _, fits, tells = by_hand(Form("negative"), g)
    assert labels.tolist() == [0, 1, 0, 3]
    assert (bool(fits), bool(tells)) == (True, False)
    g[0, 1] = -0.1
    assert not by_hand(Form("negative"), g).fits


@pytest.mark.parametrize("kind", ["hard", "weighted", "soft", "log", "negative"])
def test_a_gradient_without_the_form_has_no_labels(kind):
    """That of a squared distance; and one that is not finite."""
    torch.manual_seed(0)
    z = torch.randn(8, 6).double().log_softmax(1)
    for g in (z - torch.randn(8, 6).double(), torch.full((8, 6), torch.nan).double()):
        form, live = Form(kind), torch.ones(8, dtype=torch.bool)
        labels, _, fits, tells = read(form, z, g, live, torch.tensor(8))
        assert (bool(fits), bool(tells)) == (False, False)
        assert (labels == 6).all() if labels.ndim == 1 else (labels == 0).all()


@pytest.mark.parametrize("kind", ["hard", "weighted"])
def test_rows_that_are_all_certain_have_labels_and_no_scale(kind):
    """All that is left of p - e_y is rounding."""
    rounding = 1e-9 * torch.tensor([[-3, 1, 2], [2, -3, 1], [-3, 2, 1], [1, 2, -3]]).double()
    labels, _, fits, tells = by_hand(Form(kind), rounding, z=40.0 * E)
    assert torch.equal(labels, Y)
    assert (bool(fits), bool(tells)) == (True, False)


def test_a_weighted_row_that_is_certain_has_no_label_if_its_gradient_is_large():
    """That of a row whose loss counts as negative: what it raises is not its label."""
    z = torch.cat([P.log(), torch.tensor([[40.0, 0.0, 1.0]]).double()])
    g = torch.cat([P - E, torch.tensor([[-0.5, 0.5, 0.0]]).double()])
    live = torch.ones(5, dtype=torch.bool)
    assert read(Form("weighted"), z, g, live, torch.tensor(5)).labels.tolist() == [0, 1, 0, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0])
def test_certain_rows_beside_others_count(dtype, gap):
    """Where the probability of a label rounds to one its gradient is zero, and the row is not an ignored one yet."""
    z, y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(16) % 5
    z[torch.arange(8), y[:8]] += gap
    z.requires_grad_()
    loss = 4.0 * F.cross_entropy(z.to(torch.promote_types(dtype, torch.float32)), y)
    form, reading = settle(z, gradient(loss, z))
    assert form == Form("hard")
    assert bool(reading.tells_scale)
    assert float(reading.scale) == pytest.approx(4.0, rel=torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5)


def test_the_tolerance_is_that_of_the_narrowest_dtype():
    assert tolerance_of(torch.float32, torch.float64) == cross_entropy.TOLERANCE
    assert tolerance_of(torch.float32, torch.float16) == cross_entropy.HALF_TOLERANCE
    assert tolerance_of(torch.bfloat16, torch.float32) == cross_entropy.HALF_TOLERANCE


def test_hard_labels_of_a_script_that_mixed_them_before_are_read_as_soft_ones():
    torch.manual_seed(0)
    z, y = torch.randn(16, 6, requires_grad=True), torch.randint(6, (16,))
    g = gradient(F.cross_entropy(z, y), z)
    assert settle(z, g)[0] == Form("hard")
    form, reading = settle(z, g, former=Form("soft"))
    assert form == Form("soft")
    assert_same(reading.labels, F.one_hot(y, 6).float(), atol=1e-4)


# ---- random losses: no label is wrong --------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.float32, torch.float64, torch.bfloat16]


class Draw(NamedTuple):
    """A random batch and loss; ``gain`` is the spread of the logits, ``fit`` what the target's have gained."""

    classes: int
    rows: int
    dtype: torch.dtype
    rounds: bool  # whether the loss is computed in the dtype of the logits, if that is a half one
    factor: float
    gain: float
    fit: float
    smoothing: float
    mixed: float  # share of the first label
    seed: int

    @property
    def is_half(self) -> bool:
        return self.dtype == torch.bfloat16


def draws(seed: str, number: int, classes: int = 2, rows: int = 1, gain: float = 20.0) -> list[Draw]:
    """Random ones of at least this many classes and rows, and at most this gain."""
    rng = random.Random(seed)

    def spread(least: float, most: float) -> float:
        return math.exp(rng.uniform(math.log(least), math.log(most)))

    return [
        Draw(
            max(classes, rng.choice([2, 3, *(round(spread(2, 1000)) for _ in range(6))])),
            max(rows, round(spread(1, 300))),
            rng.choice(FLOATS),
            rng.random() < 0.5,
            spread(1 / 64, 65_536),
            spread(0.1, gain),
            max(0.0, rng.uniform(-7, 15)),
            rng.uniform(0.02, 0.3),
            rng.uniform(0.05, 0.95),
            rng.randrange(10**6),
        )
        for _ in range(number)
    ]


def focal(z: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(z, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def some_ignored(y: Tensor) -> Tensor:
    return y.where(torch.rand(len(y)) >= 0.4, -100)


HARD: dict[str, Callable[[Tensor, Tensor, Draw], Tensor]] = {
    "mean": lambda z, y, d: F.cross_entropy(z, y),
    "sum": lambda z, y, d: F.cross_entropy(z, y, reduction="sum"),
    "ignored rows": lambda z, y, d: F.cross_entropy(z, y),
    "label smoothing": lambda z, y, d: F.cross_entropy(z, y, label_smoothing=d.smoothing),
    "label smoothing, ignored rows": lambda z, y, d: F.cross_entropy(z, y, label_smoothing=d.smoothing),
    "class weights": lambda z, y, d: F.cross_entropy(z, y, (2 * torch.rand(d.classes) + 0.2).to(z)),
    "sample weights": lambda z, y, d: (
        F.cross_entropy(z, y, reduction="none") * (2 * torch.rand(d.rows) + 0.2).to(z)
    ).mean(),
    "focal": lambda z, y, d: focal(z, y),
    "log-probabilities": lambda z, y, d: F.nll_loss(z, y),
}
EXACT = ("mean", "sum", "ignored rows", "log-probabilities")  # of which s is the factor of the mean
WEIGHTED = ("class weights", "sample weights", "focal")


def drawn(name: str, d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, their gradient, and the labels."""
    torch.manual_seed(d.seed)
    y = torch.randint(d.classes, (d.rows,))
    z = torch.randn(d.rows, d.classes) * d.gain + d.fit * F.one_hot(y, d.classes)
    z = (z.log_softmax(1) if name == "log-probabilities" else z).to(d.dtype).requires_grad_()
    y = some_ignored(y) if "ignored" in name else y
    loss = d.factor * HARD[name](z.float() if d.is_half and not d.rounds else z, y, d)
    return z.detach(), gradient(loss, z), y


def is_uniform(z: Tensor) -> bool:
    """Whether predictions are those of a fresh model, of which losses look alike."""
    return float(z.double().softmax(1).amax(1).mean()) * z.shape[1] < 1.5


TABLES = cells(itertools.product(HARD, range(8)), *((name, 0) for name in HARD))


@pytest.mark.parametrize(("name", "table"), TABLES)
def test_random_losses_with_hard_labels(name, table):
    """No row has a wrong label. Some have none: they are counted.

    Models that are certain of wrong labels make weights look like mixtures of labels: they are not among the draws.
    """
    rows = unread = refused = uncertain = 0
    for d in draws(f"{name} {table}", 80, gain=6.0 if name in WEIGHTED else 20.0):
        z, g, y = drawn(name, d)
        if not g.isfinite().all():  # a batch whose rows are all ignored
            continue
        try:
            form, reading = settle(z, g)
        except Uncertain:
            uncertain += 1
            continue
        rows += d.rows
        if reading is None:
            refused += d.classes > 4 or (name in EXACT and not (d.is_half and d.rounds))
            continue
        right, labels = y.where(y >= 0, d.classes), labels_of(reading, d.classes)
        assert ((labels == right) | (labels == d.classes)).all(), (d, form)
        unread += int((labels != right).sum())
        if name in EXACT and d.classes > 3 and not is_uniform(z) and reading.tells_scale:
            expected = d.factor * (d.rows if name == "sum" else 1)
            tolerance = 0.15 if d.is_half and d.rounds else 0.02  # rounded log-probabilities of rows that are certain
            assert float(reading.scale) == pytest.approx(expected, rel=tolerance), (d, form)
    assert rows > 1500
    assert uncertain <= 40  # all rows are certain, or there is one row of two classes
    assert refused <= (8 if name in WEIGHTED else 3)
    assert unread <= (0.05 * rows if name in WEIGHTED else 0)


# ---- random losses: soft labels --------------------------------------------------------------------------------------


def shares(name: str, y: Tensor, d: Draw) -> Tensor:
    mixed = torch.full((d.rows, 1), d.mixed).double()
    if name == "CutMix of some rows":
        mixed = mixed.where(torch.rand(d.rows, 1) < 0.5, 1.0)
    q = F.one_hot(y, d.classes).double()
    return mixed * q + (1 - mixed) * q[torch.randperm(d.rows)]


MIXTURES = ("mixup", "mixup, label smoothing", "CutMix of some rows")


@pytest.mark.parametrize(
    ("name", "table"), cells(itertools.product(MIXTURES, range(8)), *((name, 0) for name in MIXTURES))
)
def test_random_mixtures_of_labels(name, table):
    """``fit`` is what the logits of the mixture have gained, each of its labels by its share."""
    read_ones = tried = wrong = rows = 0
    for d in draws(f"{name} {table}", 70, classes=5, rows=2):
        torch.manual_seed(d.seed)
        q = shares(name, torch.randint(d.classes, (d.rows,)), d)
        z = (torch.randn(d.rows, d.classes) * d.gain + d.fit * q).to(d.dtype).requires_grad_()
        inside = z.float() if d.is_half and not d.rounds else z
        smoothing = d.smoothing if "smoothing" in name else 0.0
        g = gradient(d.factor * F.cross_entropy(inside, q.to(inside), label_smoothing=smoothing), z)
        try:
            _, reading = settle(z, g)
        except Uncertain:
            continue
        tried += 1
        if reading is not None:
            labels = reading.labels
            labels = F.one_hot(labels, d.classes + 1)[:, :-1].double() if labels.ndim == 1 else labels.double()
            told, off = labels.sum(1) > 0, (labels - q).abs().amax(1)
            wrong, rows = wrong + int((off[told] > (0.15 if d.is_half else 0.02)).sum()), rows + d.rows
            read_ones += 1
    assert tried > 50
    assert read_ones >= 0.65 * tried
    assert wrong <= 0.005 * rows


@pytest.mark.parametrize(("classes", "fit"), [(6, 6.5), (30, 8.0)])
def test_mixed_labels_of_a_fitted_model_are_not_the_hard_ones_of_a_model_that_is_certain_of_another_class(classes, fit):
    """To the rounding of bfloat16 both have the gradient 0.3 (e_j - e_y)."""
    torch.manual_seed(0)
    y = torch.randint(classes, (64,))
    q = 0.7 * F.one_hot(y, classes) + 0.3 * F.one_hot((y + 1) % classes, classes)
    z = (fit * F.one_hot(y, classes) + 0.3 * torch.randn(64, classes)).bfloat16().requires_grad_()
    form, reading = settle(z, gradient(F.cross_entropy(z.float(), q), z))
    assert form.kind == "soft"
    assert_same(reading.labels, q, atol=0.05)


# ---- random losses that are no cross-entropies -----------------------------------------------------------------------

OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z)),
    "multi-label": lambda z, y: F.binary_cross_entropy_with_logits(z, (torch.rand(z.shape) < 0.5).to(z)),
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z)),
    "regression": lambda z, y: F.mse_loss(z, torch.randn(z.shape).to(z)),
    "distillation": lambda z, y: F.cross_entropy(z, F.softmax(2 * torch.randn(z.shape), 1).to(z)),
    "negated": lambda z, y: -F.cross_entropy(z, y),
}


@pytest.mark.parametrize(("name", "table"), cells(itertools.product(OTHERS, range(8)), *((name, 0) for name in OTHERS)))
def test_random_losses_that_are_no_cross_entropies_are_not_read(name, table):
    """Of three classes or more: two have too few numbers in a row to say so of a few rows, as any of one row."""
    said = 0
    for d in draws(f"{name} {table}", 50, classes=3, rows=4):
        torch.manual_seed(d.seed)
        y = torch.randint(d.classes, (d.rows,))
        z = (torch.randn(d.rows, d.classes) * d.gain + d.fit * F.one_hot(y, d.classes)).to(d.dtype).requires_grad_()
        inside = z.float() if d.is_half and not d.rounds else z
        g = gradient(d.factor * OTHERS[name](inside, y), z)
        if is_uniform(z.detach()):
            continue
        try:
            form, _ = settle(z, g)
        except Uncertain:
            continue
        said += 1
        assert form is None, (d, form)
    assert said > 25


MORE_OTHERS = {
    **OTHERS,
    "advantages": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.linspace(-1, 1, len(y)).to(z)).mean(),
    "temperature in the loss": lambda z, y: F.cross_entropy(z / 2, y),
    "with a logit penalty": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "nll of logits": F.nll_loss,
}


@pytest.mark.parametrize(
    ("name", "classes"),
    cells(
        itertools.product(MORE_OTHERS, [2, 10]),
        *((name, 10) for name in MORE_OTHERS if name not in OTHERS),
        ("binary", 2),
        ("distillation", 2),
    ),
)
def test_the_gradients_of_other_losses_have_no_labels(name, classes):
    torch.manual_seed(0)
    z, y = (2 * torch.randn(32, classes)).requires_grad_(), torch.randint(classes, (32,))
    assert settle(z.detach(), gradient(MORE_OTHERS[name](z, y), z)) == (None, None)


@pytest.mark.parametrize(
    ("classes", "bias", "loss", "rows"),
    cells(
        itertools.product([3, 100], [-4.6, 0.0], ["binary", "squares"], [2, 16]),
        *((100, -4.6, "squares", 16), (3, -4.6, "binary", 16), (100, 0.0, "binary", 2), (3, 0.0, "squares", 2)),
    ),
)
def test_a_prior_bias_and_tiny_batches_pass_for_no_cross_entropy(classes, bias, loss, rows):
    """A head that begins at the classes' prior probability, as detection heads do."""
    torch.manual_seed(2)
    z, y = (bias + 0.5 * torch.randn(rows, classes)).requires_grad_(), torch.randint(classes, (rows,))
    assert settle(z.detach(), gradient(OTHERS[loss](z, y), z)) == (None, None)


# ---- label smoothing, half precision, two classes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_classes_in_half_precision_are_read_once_predictions_differ_by_more_than_rounding(dtype):
    """The negated loss is that of the other class with other factors, which are too close to tell before."""
    y = torch.arange(32) % 2
    for spread, is_read in ((0.03, False), (1.0, True)):
        z = (spread * torch.randn(32, 2, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
        for sign in (1, -1):
            g = gradient(sign * 64 * F.cross_entropy(z.float(), y), z)
            if is_read:
                assert (settle(z.detach(), g)[0] is not None) == (sign == 1)
            else:
                with pytest.raises(Uncertain):
                    settle(z.detach(), g)


@pytest.mark.parametrize(
    ("classes", "learned"),
    cells(itertools.product([3, 10, 1000], [0.0, 3.0, 6.0]), (3, 6.0), (10, 0.0), (1000, 3.0)),
)
def test_smoothed_labels_are_read_also_where_the_target_is_overconfident(classes, learned):
    torch.manual_seed(0)
    y = torch.randint(classes, (64,))
    z = (torch.randn(64, classes).double() + learned * F.one_hot(y, classes)).requires_grad_()
    form, reading = settle(z, gradient(3 * F.cross_entropy(z, y, label_smoothing=0.1), z))
    assert form is not None
    assert form.smoothing == pytest.approx(0.1, rel=1e-4)
    assert torch.equal(labels_of(reading, classes), y)
    assert float(reading.scale) == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize(
    ("classes", "spread", "learned"),
    cells(itertools.product([3, 4, 5], [1.0, 2.0], [0.0, 3.0]), (3, 2.0, 3.0), (4, 2.0, 0.0), (5, 2.0, 3.0)),
)
def test_smoothed_labels_of_few_classes_are_read_where_some_targets_are_overconfident(classes, spread, learned):
    for seed in range(10):
        torch.manual_seed(seed)
        y = torch.randint(classes, (64,))
        z = (spread * torch.randn(64, classes) + learned * F.one_hot(y, classes)).requires_grad_()
        form, reading = settle(z, gradient(F.cross_entropy(z, y, label_smoothing=0.1), z))
        assert form is not None
        assert torch.equal(labels_of(reading, classes), y)


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
    z, y = (torch.randn(64, classes) * spread).bfloat16().requires_grad_(), torch.randint(classes, (64,))
    _, reading = settle(z, gradient(F.cross_entropy(z.float(), y, label_smoothing=0.1), z))
    assert torch.equal(labels_of(reading, classes), y)


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
    z, y = (torch.randn(16, classes) * spread).bfloat16().requires_grad_(), torch.randint(classes, (16,))
    _, reading = settle(z, gradient(F.cross_entropy(z, y, label_smoothing=smoothing), z))
    assert torch.equal(labels_of(reading, classes), y)


def test_confident_rows_whose_gradient_vanishes_in_float16():
    """Each has no label, since it may be an ignored one, and does not count."""
    z = torch.tensor([[30.0, 0.0, 0.0], [0.0, 1.0, 0.5]], dtype=torch.float16, requires_grad=True)
    g = gradient(4 * F.cross_entropy(z.float(), torch.tensor([0, 1])), z)
    _, reading = settle(z, g)
    assert reading.labels.tolist() == [3, 1]
    assert float(reading.scale) == pytest.approx(2.0, rel=1e-2)


def test_a_certain_row_has_the_label_that_it_is_certain_of():
    # The third is certain, and wrong; the last has a gradient of zero at the label and at a class that is out of reach.
    z = torch.tensor([[40.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.0, 30.0, 0.0], [-200.0, 60.0, 0.0]], requires_grad=True)
    y = torch.tensor([0, 1, 0, 1])
    _, reading = settle(z, gradient(F.cross_entropy(z, y), z))
    assert ((reading.labels == y) | (reading.labels == 3)).all()
    assert (reading.labels == y)[1:3].all()


def test_a_masked_class_does_not_take_the_labels_of_certain_rows():
    """Its gradient is zero; so is that of a label whose probability rounds to one."""
    torch.manual_seed(0)
    z, y = torch.randn(16, 6), 1 + torch.arange(16) % 5
    z[range(4), y[:4]] += 25.0
    z[:, 0] = -1e9
    z.requires_grad_()
    form, reading = settle(z, gradient(F.cross_entropy(z, y), z))
    assert form == Form("hard")
    assert ((reading.labels == y) | (reading.labels == 6)).all()
    assert torch.equal(reading.labels[4:], y[4:])


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
        try:
            form, reading = settle(z, gradient(F.cross_entropy(z, y), z))
        except Uncertain:
            continue
        if form is None:  # too little is left of rounded probabilities
            continue
        labels = labels_of(reading, classes)
        assert ((labels == y) | (labels == classes)).all()


@pytest.mark.parametrize(
    ("name", "spread"),
    cells(
        itertools.product(["mean", "class weights", "label smoothing"], [0.1, 1.0, 4.0]),
        *(("mean", 4.0), ("class weights", 0.1), ("label smoothing", 1.0)),
    ),
)
def test_two_classes(name, spread):
    torch.manual_seed(1)
    z, y = (torch.randn(64, 2) * spread).requires_grad_(), torch.randint(2, (64,))
    d = Draw(2, 64, torch.float32, False, 1.0, spread, 0.0, 0.1, 0.0, 0)
    _, reading = settle(z, gradient(HARD[name](z, y, d), z))
    assert torch.equal(reading.labels, y)


@pytest.mark.parametrize("rows", cells([4, 16, 64], 16))
def test_focal_losses_of_two_classes_are_not_read(rows):
    """Every row is on some line, so that nothing tells a row's own factor from another loss."""
    for seed in range(20):
        torch.manual_seed(seed)
        z, y = torch.randn(rows, 2, requires_grad=True), torch.randint(2, (rows,))
        try:
            form, _ = settle(z, gradient(focal(z, y), z))
        except Uncertain:
            continue
        assert form is None


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
    for seed in range(40):
        torch.manual_seed(seed)
        y = torch.randint(2, (rows,))
        z = (torch.randn(rows, 2) + learned * F.one_hot(y, 2)).requires_grad_()
        try:
            _, reading = settle(z, gradient(F.cross_entropy(z, y, label_smoothing=smoothing), z))
        except Uncertain:
            continue
        if reading is not None:
            wrong += int(((reading.labels != y) & (reading.labels != 2)).sum())
    assert wrong <= (1 if rows == 2 else 0)  # of two rows, two slopes may be the same by chance
