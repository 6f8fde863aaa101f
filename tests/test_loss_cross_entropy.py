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

from dcl_optim.distances import wide
from dcl_optim.loss import cross_entropy
from dcl_optim.loss.cross_entropy import Evidence, Form, Gradient, Reading, candidates, examine, read, tolerance_of
from tests.helpers import assert_same, cells

Criterion = Callable[[Tensor, Tensor], Tensor]
NOTHING = "tells nothing"  # in place of a form: such a batch is skipped, and the next one is asked


def settle(loss: Tensor, z: Tensor, former: Form | None = None) -> tuple[Form | str | None, Reading | None]:
    """The form of the gradient that a loss sends to z, and the reading by it; None for no known form."""
    (g,) = torch.autograd.grad(loss, z)
    live = g.abs().amax(1) > 0
    seen = Gradient(z.detach(), g, live, live.sum(), tolerance_of(z.dtype, g.dtype))
    evidence = Evidence(*examine(seen).tolist())
    if not evidence.says:
        return NOTHING, None
    for _, form in candidates(evidence, z.shape[1], former):
        reading = read(form, seen)
        if reading.fits:
            return form, reading
    return None, None


def labels_of(reading: Reading, classes: int) -> Tensor:
    """The label of each row, ``classes`` for none; of soft labels the class with the largest share."""
    labels = reading.labels
    return labels if labels.ndim == 1 else labels.argmax(1).where(labels.sum(1) > 0, classes)


def drawn(
    seed: int, classes: int, rows: int = 64, spread: float = 1.0, learned: float = 0.0, dtype: torch.dtype = torch.float
) -> tuple[Tensor, Tensor]:
    """Logits, whose targets' have gained ``learned``, and labels."""
    torch.manual_seed(seed)
    y = torch.randint(classes, (rows,))
    z = spread * torch.randn(rows, classes) + learned * F.one_hot(y, classes)
    return z.to(dtype).requires_grad_(), y


# ---- by hand ---------------------------------------------------------------------------------------------------------

P = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25]], dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 2])
E = F.one_hot(Y, 3).double()
FACTORS = torch.tensor([[0.5], [3.0], [2.0], [1.25]]).double()
SURE = torch.tensor([[0.98, 0.015, 0.005], *P[1:].tolist()]).double()


def by_hand(form: Form, g: Tensor, z: Tensor | None = None, num_live: int | None = None) -> Reading:
    live = g.abs().amax(1) > 0
    number = live.sum() if num_live is None else torch.tensor(num_live)
    return read(form, Gradient(P.log() if z is None else z, g, live, number))


@pytest.mark.parametrize(
    ("form", "z", "g", "labels", "scale"),
    [
        (Form("hard"), P.log(), 2.0 * (P - E), [0, 1, 0, 2], 8.0),
        # A row whose gradient is zero has no label, and does not count.
        (Form("hard"), P.log(), 2.0 * (P - E) * torch.tensor([[1], [1], [0], [1]]), [0, 1, 3, 2], 6.0),
        # The first row is surer than its target, and its lowest entry of g is another class.
        (Form("hard", 0.1), SURE.log(), 2.0 * (SURE - (0.9 * E + 0.1 / 3)), [0, 1, 0, 2], 8.0),
        (Form("weighted"), P.log(), FACTORS * (P - E), [0, 1, 0, 2], 6.75),
        (Form("log"), P.log(), -FACTORS * E, [0, 1, 0, 2], 6.75),
    ],
    ids=["hard", "a row without a gradient", "label smoothing", "weighted", "log-probabilities"],
)
def test_hard_labels_by_hand(form, z, g, labels, scale):
    reading = by_hand(form, g, z)
    assert reading.labels.tolist() == labels
    assert float(reading.scale) == pytest.approx(scale, rel=1e-7)
    assert (bool(reading.fits), bool(reading.tells_scale)) == (True, True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_by_hand(smoothing):
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(4, 6).double(), 1)
    q = torch.zeros(4, 6).double()
    q[range(4), [0, 1, 0, 2]] += torch.tensor([0.7, 1.0, 0.5, 0.4]).double()
    q[range(4), [3, 4, 5, 1]] += torch.tensor([0.3, 0.0, 0.5, 0.6]).double()
    labels, scale, fits, tells, _ = by_hand(
        Form("soft", smoothing), 2.0 * (p - ((1 - smoothing) * q + smoothing / 6)), p.log()
    )
    assert_same(labels, q, atol=1e-12)
    assert float(scale) == pytest.approx(8.0, rel=1e-9)
    assert (bool(fits), bool(tells)) == (True, True)


@pytest.mark.parametrize("kind", ["hard", "weighted", "soft", "log"])
def test_rows_that_are_a_selection_stand_for_all(kind):
    """The scale is that of ``num_live`` rows."""
    z, q = torch.randn(4, 6).double().log_softmax(1), F.one_hot(torch.tensor([0, 1, 0, 5]), 6).double()
    g = -2.0 * q if kind == "log" else 2.0 * (z.exp() - q)
    assert float(by_hand(Form(kind), g, z, num_live=40).scale) == pytest.approx(80.0, rel=1e-9)


@pytest.mark.parametrize(("wrong", "fits"), [(1, True), (2, False)])
def test_a_weighted_row_on_no_line_has_no_label_and_three_of_four_have_to_be_on_one(wrong, fits):
    g = P - E
    g[:wrong] = torch.tensor([-0.4, 0.1, 0.3])
    reading = by_hand(Form("weighted"), g)
    assert bool(reading.fits) == fits
    assert reading.labels.tolist() == ([3, 1, 0, 2] if fits else [3] * 4)


def squared_distance(z: Tensor) -> Tensor:
    return z - torch.randn(z.shape).to(z)


def not_finite(z: Tensor) -> Tensor:
    return torch.full_like(z, torch.nan)


def share_below_zero(z: Tensor) -> Tensor:
    q = F.one_hot(torch.arange(len(z)) % 6, 6).to(z)
    q[0, 0], q[0, 5] = 1.3, -0.3
    return 2.0 * (z.exp() - q)


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [
        *itertools.product(["hard", "weighted", "soft", "log"], [squared_distance, not_finite]),
        ("soft", share_below_zero),
    ],
)
def test_a_gradient_without_the_form_has_no_labels(kind, gradient):
    torch.manual_seed(0)
    z = torch.randn(8, 6).double().log_softmax(1)
    labels, _, fits, tells, _ = by_hand(Form(kind), gradient(z), z)
    assert (bool(fits), bool(tells)) == (False, False)
    assert (labels == 6).all() if labels.ndim == 1 else (labels == 0).all()


def test_logits_that_are_no_log_probabilities_have_not_the_form_log():
    assert not by_hand(Form("log"), -E, P.log() + 1.0).fits


@pytest.mark.parametrize("kind", ["hard", "weighted"])
def test_rows_that_are_all_certain_have_labels_and_no_scale(kind):
    """All that is left of p - e_y is rounding."""
    rounding = 1e-9 * torch.tensor([[-3, 1, 2], [2, -3, 1], [-3, 2, 1], [1, 2, -3]]).double()
    labels, _, fits, tells, _ = by_hand(Form(kind), rounding, 40.0 * E)
    assert torch.equal(labels, Y)
    assert (bool(fits), bool(tells)) == (True, False)


def test_a_weighted_row_that_is_certain_has_no_label_if_its_gradient_is_large():
    """That of a row whose loss counts as negative: what it raises is not its label."""
    z = torch.cat([P.log(), torch.tensor([[40.0, 0.0, 1.0]]).double()])
    g = torch.cat([P - E, torch.tensor([[-0.5, 0.5, 0.0]]).double()])
    assert by_hand(Form("weighted"), g, z).labels.tolist() == [0, 1, 0, 2, 3]


def test_the_tolerance_is_that_of_the_narrowest_dtype():
    assert tolerance_of(torch.float32, torch.float64) == cross_entropy.TOLERANCE
    assert tolerance_of(torch.float32, torch.float16) == cross_entropy.HALF_TOLERANCE
    assert tolerance_of(torch.bfloat16, torch.float32) == cross_entropy.HALF_TOLERANCE


def test_hard_labels_of_a_script_that_mixed_them_before_are_read_as_soft_ones():
    z, y = drawn(0, 6)
    assert settle(F.cross_entropy(z, y), z)[0] == Form("hard")
    form, reading = settle(F.cross_entropy(z, y), z, former=Form("soft"))
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

    def logits(self, q: Tensor) -> Tensor:
        """Logits of which those of labels have gained by their shares."""
        z = torch.randn(self.rows, self.classes) * self.gain + self.fit * q
        return z.to(self.dtype).requires_grad_()

    def inside(self, z: Tensor) -> Tensor:
        """The logits as the loss gets them."""
        return z.float() if self.is_half and not self.rounds else z


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


def class_weighted(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, (2 * torch.rand(z.shape[1]) + 0.2).to(z))


def sample_weighted(z: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(z, y, reduction="none") * (2 * torch.rand(len(y)) + 0.2).to(z)).mean()


def smoothed(z: Tensor, y: Tensor, smoothing: float = 0.1) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=smoothing)


HARD: dict[str, Callable[[Tensor, Tensor, Draw], Tensor]] = {
    "mean": lambda z, y, d: F.cross_entropy(z, y),
    "sum": lambda z, y, d: F.cross_entropy(z, y, reduction="sum"),
    "ignored rows": lambda z, y, d: F.cross_entropy(z, y),
    "label smoothing": lambda z, y, d: smoothed(z, y, d.smoothing),
    "label smoothing, ignored rows": lambda z, y, d: smoothed(z, y, d.smoothing),
    "class weights": lambda z, y, d: class_weighted(z, y),
    "sample weights": lambda z, y, d: sample_weighted(z, y),
    "focal": lambda z, y, d: focal(z, y),
    "log-probabilities": lambda z, y, d: F.nll_loss(z, y),
}
EXACT = ("mean", "sum", "ignored rows", "log-probabilities")  # of which s is the factor of the mean
WEIGHTED = ("class weights", "sample weights", "focal")


def is_uniform(z: Tensor) -> bool:
    """Whether predictions are those of a fresh model, of which losses look alike."""
    return float(z.detach().double().softmax(1).amax(1).mean()) * z.shape[1] < 1.5


def eight_tables(names):
    """One table of draws by default, eight in all."""
    return cells(itertools.product(names, range(8)), *((name, 0) for name in names))


@pytest.mark.parametrize(("name", "table"), eight_tables(HARD))
def test_random_losses_with_hard_labels(name, table):
    """No row has a wrong label. Some have none: they are counted.

    Models that are certain of wrong labels make weights look like mixtures of labels: they are not among the draws.
    """
    rows = unread = refused = silent = 0
    for d in draws(f"{name} {table}", 80, gain=6.0 if name in WEIGHTED else 20.0):
        torch.manual_seed(d.seed)
        y = torch.randint(d.classes, (d.rows,))
        z = d.logits(F.one_hot(y, d.classes))
        if name == "log-probabilities":
            z = z.detach().float().log_softmax(1).to(d.dtype).requires_grad_()
        if "ignored" in name:
            y = y.where(torch.rand(len(y)) >= 0.4, -100)
        loss = d.factor * HARD[name](d.inside(z), y, d)
        if not loss.isfinite():  # a batch whose rows are all ignored
            continue
        form, reading = settle(loss, z)
        if form == NOTHING:  # all rows are certain, or there is one row of two classes
            silent += 1
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
    assert silent <= 40
    assert refused <= (8 if name in WEIGHTED else 3)
    assert unread <= (0.05 * rows if name in WEIGHTED else 0)


@pytest.mark.parametrize(("name", "table"), eight_tables(("mixup", "mixup, label smoothing", "CutMix of some rows")))
def test_random_mixtures_of_labels(name, table):
    """``fit`` is what the logits of the mixture have gained, each of its labels by its share."""
    num_read = tried = wrong = rows = 0
    for d in draws(f"{name} {table}", 70, classes=5, rows=2):
        torch.manual_seed(d.seed)
        q = F.one_hot(torch.randint(d.classes, (d.rows,)), d.classes).double()
        share = torch.full((d.rows, 1), d.mixed).double()
        if name == "CutMix of some rows":
            share = share.where(torch.rand(d.rows, 1) < 0.5, 1.0)
        q = share * q + (1 - share) * q[torch.randperm(d.rows)]
        z = d.logits(q)
        loss = smoothed(d.inside(z), q.to(d.inside(z)), d.smoothing if "smoothing" in name else 0.0)
        form, reading = settle(d.factor * loss, z)
        tried += form != NOTHING
        if reading is not None:
            labels = reading.labels
            labels = F.one_hot(labels, d.classes + 1)[:, :-1].double() if labels.ndim == 1 else labels.double()
            off = (labels - q).abs().amax(1)[labels.sum(1) > 0]
            wrong += int((off > (0.15 if d.is_half else 0.02)).sum())
            rows += d.rows
            num_read += 1
    assert tried > 50
    assert num_read >= 0.65 * tried
    assert wrong <= 0.005 * rows


@pytest.mark.parametrize(("classes", "fit"), [(6, 6.5), (30, 8.0)])
def test_mixed_labels_of_a_fitted_model_are_not_the_hard_ones_of_a_model_that_is_certain_of_another_class(classes, fit):
    """To the rounding of bfloat16 both have the gradient 0.3 (e_j - e_y)."""
    z, y = drawn(0, classes, spread=0.3, learned=fit, dtype=torch.bfloat16)
    q = 0.7 * F.one_hot(y, classes) + 0.3 * F.one_hot((y + 1) % classes, classes)
    form, reading = settle(F.cross_entropy(z.float(), q), z)
    assert form.kind == "soft"
    assert_same(reading.labels, q, atol=0.05)


# ---- random losses that are no cross-entropies -----------------------------------------------------------------------

OTHERS: dict[str, Criterion] = {
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z)),
    "multi-label": lambda z, y: F.binary_cross_entropy_with_logits(z, (torch.rand(z.shape) < 0.5).to(z)),
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z)),
    "regression": lambda z, y: F.mse_loss(z, torch.randn(z.shape).to(z)),
    "distillation": lambda z, y: F.cross_entropy(z, F.softmax(2 * torch.randn(z.shape), 1).to(z)),
    "negated": lambda z, y: -F.cross_entropy(z, y),
}


@pytest.mark.parametrize(("name", "table"), eight_tables(OTHERS))
def test_random_losses_that_are_no_cross_entropies_are_not_read(name, table):
    """Of three classes or more: two have too few numbers in a row to say so of a few rows, as any of one row."""
    said = 0
    for d in draws(f"{name} {table}", 50, classes=3, rows=4):
        torch.manual_seed(d.seed)
        y = torch.randint(d.classes, (d.rows,))
        z = d.logits(F.one_hot(y, d.classes))
        loss = d.factor * OTHERS[name](d.inside(z), y)
        if is_uniform(z):
            continue
        form, reading = settle(loss, z)
        said += form != NOTHING
        assert reading is None, (d, form)
    assert said > 25


MORE_OTHERS = {
    **{name: OTHERS[name] for name in ("binary", "distillation")},
    "advantages": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.linspace(-1, 1, len(y)).to(z)).mean(),
    "temperature in the loss": lambda z, y: F.cross_entropy(z / 2, y),
    "with a logit penalty": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "nll of logits": F.nll_loss,
}


@pytest.mark.parametrize("name", MORE_OTHERS)
@pytest.mark.parametrize("classes", [2, 10])
def test_the_gradients_of_other_losses_have_no_labels(name, classes):
    z, y = drawn(0, classes, rows=32, spread=2.0)
    assert settle(MORE_OTHERS[name](z, y), z) == (None, None)


@pytest.mark.parametrize("spread", [0.0, 0.002])
def test_a_binary_loss_of_uniform_predictions_is_not_taken_for_mixed_labels(spread):
    z, y = drawn(0, 8, rows=12, spread=spread)
    assert settle(OTHERS["binary"](z, y), z) == (None, None)


def test_labels_with_a_penalty_on_their_logits_are_not_taken_for_mixed_labels_in_bfloat16():
    """Their shares would sum to about 0.95, which is more than rounding."""
    torch.manual_seed(0)
    z, y = (0.1 * torch.randn(36, 12) + 0.05).bfloat16().requires_grad_(), torch.arange(36) % 12
    own = z.float()[torch.arange(36), y]
    assert settle(F.cross_entropy(z.float(), y) + 0.5 * own.square().mean(), z) == (None, None)


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
    assert settle(OTHERS[loss](z, y), z) == (None, None)


# ---- what is read ----------------------------------------------------------------------------------------------------

READABLE: dict[str, Criterion] = {
    "mean": F.cross_entropy,
    "class weights": class_weighted,
    "smoothed": smoothed,
    "smoothed, in float32": lambda z, y: smoothed(z.float(), y),
}
TABLE = [
    # Targets that are surer than the smoothed label.
    *itertools.product(["smoothed"], [3, 4, 5, 1000], ["float64"], [1.0, 2.0], [0.0, 3.0, 6.0]),
    # A fresh model, whose logits differ a little: enough for the form, little beside the rounding of the rest.
    *itertools.product(["smoothed, in float32"], [3, 10, 1000], ["bfloat16"], [0.0, 0.02, 0.1, 0.5], [0.0]),
    # Rounded log-probabilities move the probabilities of many classes by per cents.
    *itertools.product(["mean", "smoothed"], [10, 1000, 20_000], ["bfloat16"], [0.0, 0.1, 1.0, 3.0], [0.0]),
    *itertools.product(["mean", "class weights", "smoothed"], [2], ["float32"], [0.1, 1.0, 4.0], [0.0]),
]


@pytest.mark.parametrize(
    ("name", "classes", "dtype", "spread", "learned"),
    cells(
        TABLE,
        *(("smoothed", 3, "float64", 2.0, 3.0), ("smoothed", 5, "float64", 1.0, 6.0)),
        *(("smoothed", 4, "float64", 2.0, 0.0), ("smoothed", 1000, "float64", 1.0, 3.0)),
        *(("smoothed, in float32", 3, "bfloat16", 0.0, 0.0), ("smoothed, in float32", 1000, "bfloat16", 0.02, 0.0)),
        *(("mean", 10, "bfloat16", 0.0, 0.0), ("mean", 20_000, "bfloat16", 3.0, 0.0)),
        *(("smoothed", 1000, "bfloat16", 1.0, 0.0), ("smoothed", 20_000, "bfloat16", 0.1, 0.0)),
        *(("mean", 2, "float32", 4.0, 0.0), ("class weights", 2, "float32", 0.1, 0.0)),
        ("smoothed", 2, "float32", 1.0, 0.0),
    ),
)
def test_all_labels_are_read(name, classes, dtype, spread, learned):
    for seed in range(3):
        z, y = drawn(seed, classes, 16 if classes > 1000 else 64, spread, learned, getattr(torch, dtype))
        form, reading = settle(3 * READABLE[name](z, y), z)
        assert torch.equal(labels_of(reading, classes), y)
        if dtype != "bfloat16":
            assert form.smoothing == pytest.approx(0.1 * (name == "smoothed"), rel=1e-3)
            assert float(reading.scale) == pytest.approx(3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0])
def test_certain_rows_beside_others_count(dtype, gap):
    """Where the probability of a label rounds to one its gradient is zero, and the row is not an ignored one yet."""
    z, y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(16) % 5
    z[torch.arange(8), y[:8]] += gap
    z.requires_grad_()
    form, reading = settle(4.0 * F.cross_entropy(wide(z), y), z)
    assert form == Form("hard")
    assert bool(reading.tells_scale)
    assert float(reading.scale) == pytest.approx(4.0, rel=torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5)


def test_confident_rows_whose_gradient_vanishes_in_float16():
    """Each has no label, since it may be an ignored one, and does not count."""
    z = torch.tensor([[30.0, 0.0, 0.0], [0.0, 1.0, 0.5]], dtype=torch.float16, requires_grad=True)
    _, reading = settle(4 * F.cross_entropy(z.float(), torch.tensor([0, 1])), z)
    assert reading.labels.tolist() == [3, 1]
    assert float(reading.scale) == pytest.approx(2.0, rel=1e-2)


def test_a_certain_row_has_the_label_that_it_is_certain_of():
    # The third is certain, and wrong; the last has a gradient of zero at the label and at a class that is out of reach.
    z = torch.tensor([[40.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.0, 30.0, 0.0], [-200.0, 60.0, 0.0]], requires_grad=True)
    _, reading = settle(F.cross_entropy(z, torch.tensor([0, 1, 0, 1])), z)
    assert reading.labels[1:3].tolist() == [1, 0]
    assert {*zip(reading.labels.tolist()[::3], (0, 1), strict=True)} <= {(0, 0), (1, 1), (3, 0), (3, 1)}


@pytest.mark.parametrize(("margin", "heaviest"), [(25.0, 1.0), (90.0, 1.0), (60.0, 4.0)])
def test_a_masked_class_does_not_take_the_labels_of_certain_rows(margin, heaviest):
    """Its gradient is zero; so is that of a label whose probability rounds to one. The scale is that of the mean."""
    torch.manual_seed(0)
    z, y = torch.randn(32, 6), 1 + torch.arange(32) % 5
    z[range(8), y[:8]] += margin
    z[:, 0] = -1e9
    z.requires_grad_()
    form, reading = settle(0.5 * F.cross_entropy(z, y, torch.linspace(1.0, heaviest, 6)), z)
    assert form == Form("hard" if heaviest == 1 else "weighted")
    assert ((reading.labels == y) | (reading.labels == 6)).all()
    assert torch.equal(reading.labels[8:], y[8:])
    if heaviest == 1:
        assert float(reading.scale) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("margin", [9.0, 12.0, 40.0, 78.0])
def test_class_weights_of_rows_that_are_certain_count_in_the_scale(classes, margin):
    """1 - p of such a row is rounding, but the other entries of its gradient are exact."""
    torch.manual_seed(0)
    y = torch.arange(64) % classes
    known = torch.arange(classes) < classes // 2
    z = (torch.randn(64, classes) + margin * known[y][:, None] * F.one_hot(y, classes)).requires_grad_()
    _, reading = settle(F.cross_entropy(z, y, torch.where(known, 0.2, 2.0)), z)
    assert float(reading.scale) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(("classes", "factor"), [(100, 64.0), (1000, 1.0), (1000, 64.0)])
def test_certain_rows_with_class_weights_are_read_in_float16_too(classes, factor):
    """Their small entries are rounded more than the label's."""
    torch.manual_seed(0)
    z, y = torch.randn(32, classes), torch.arange(32)
    z[range(32), y] += torch.tensor([14.0] * 16 + [4.0] * 16)
    z = z.half().requires_grad_()
    _, reading = settle(factor * F.cross_entropy(z.float(), y, 0.1 + 2 * torch.rand(classes)), z)
    is_read = reading.labels < classes
    assert is_read.sum() > 16
    assert torch.equal(reading.labels[is_read], y[is_read])
    assert float(reading.scale) == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize(
    ("classes", "learned"),
    cells(itertools.product([2, 3, 10, 100], [2.0, 5.0, 7.0]), (2, 7.0), (3, 2.0), (10, 5.0), (100, 7.0)),
)
def test_a_cross_entropy_in_bfloat16_itself_of_confident_predictions_has_no_wrong_label(classes, learned):
    """It takes 1 off probabilities that are rounded to bfloat16: too little may be left."""
    for seed in range(20):
        z, y = drawn(seed, classes, 32, learned=learned, dtype=torch.bfloat16)
        _, reading = settle(F.cross_entropy(z, y), z)
        if reading is not None:
            labels = labels_of(reading, classes)
            assert ((labels == y) | (labels == classes)).all()


# ---- two classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_classes_in_half_precision_are_read_once_predictions_differ_by_more_than_rounding(dtype):
    """The negated loss is that of the other class with other factors, which are too close to tell before."""
    y = torch.arange(32) % 2
    for spread, is_read in ((0.03, False), (1.0, True)):
        z = (spread * torch.randn(32, 2, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
        for sign in (1, -1):
            form, _ = settle(sign * 64 * F.cross_entropy(z.float(), y), z)
            assert (
                (form in (Form("hard"), Form("weighted")) if sign == 1 else form is None)
                if is_read
                else form == NOTHING
            )


@pytest.mark.parametrize("rare", [1, 2])
def test_class_weights_are_read_of_a_label_with_one_row_or_with_rows_close_together(rare):
    """The other label's rows show the line."""
    z, y = torch.randn(16, 2, generator=torch.Generator().manual_seed(0)), (torch.arange(16) < rare).long()
    z[:rare] = torch.tensor([0.3, 0.5])
    z[0, 0] += 0.01 * (rare - 1)
    z.requires_grad_()
    form, reading = settle(F.cross_entropy(z, y, torch.tensor([1.0, 30.0])), z)
    assert form == Form("weighted")
    assert torch.equal(reading.labels, y)
    assert float(reading.scale) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("rows", cells([4, 16, 64], 16))
def test_focal_losses_of_two_classes_are_not_read(rows):
    """Every row is on some line, so that nothing tells a row's own factor from another loss."""
    for seed in range(20):
        z, y = drawn(seed, 2, rows)
        assert settle(focal(z, y), z)[1] is None


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
        z, y = drawn(seed, 2, rows, learned=learned)
        _, reading = settle(smoothed(z, y, smoothing), z)
        if reading is not None:
            wrong += int(((reading.labels != y) & (reading.labels != 2)).sum())
    assert wrong <= (1 if rows == 2 else 0)  # of two rows, two slopes may be the same by chance
