"""Labels and loss scale, read off gradients: by hand, of random losses, and of losses that are no cross-entropies."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from dcl_optim.layout import wide
from dcl_optim.loss import cross_entropy
from dcl_optim.loss.cross_entropy import (
    LOG,
    Form,
    best,
    choices,
    each_row_fits,
    is_beyond_doubt,
    read,
    rounding_of,
    tells_form,
    tolerance_of,
)
from tests.adversary.losses import count
from tests.helpers import every, skip_smoothing_of_torch_2_6

NOTHING = "tells nothing"  # in place of a form: such a batch is skipped, and the next one is asked


def settle(loss, z):
    """The smoothing of the gradient that a loss sends to z, and the reading by it; None for no known form."""
    (g,) = torch.autograd.grad(loss, z)
    z = z.detach()
    if not tells_form(z, g):
        return NOTHING, None
    readings = {form: read(form, z, g) for form in [Form(LOG), *choices(z, g)]}
    form = best(readings)
    return (None, None) if form is None else (form.smoothing, readings[form])


def drawn(seed, classes, rows=64, spread=1.0, learned=0.0, dtype=torch.float):
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


@pytest.mark.parametrize(
    ("form", "z", "g", "labels", "scale"),
    [
        (0.0, P.log(), 2.0 * (P - E), [0, 1, 0, 2], 8.0),
        # A row whose gradient is zero has no label, and does not count.
        (0.0, P.log(), 2.0 * (P - E) * torch.tensor([[1], [1], [0], [1]]), [0, 1, 3, 2], 6.0),
        # The first row is surer than its target, and its lowest entry of g is another class.
        (0.1, SURE.log(), 2.0 * (SURE - (0.9 * E + 0.1 / 3)), [0, 1, 0, 2], 8.0),
        (LOG, P.log(), -2.0 * E, [0, 1, 0, 2], 8.0),
    ],
    ids=["hard", "a row without a gradient", "label smoothing", "log-probabilities"],
)
def test_hard_labels_by_hand(form, z, g, labels, scale):
    reading = read(Form(form), z, g)
    assert reading.labels.tolist() == labels
    assert float(reading.scale) == pytest.approx(scale, rel=1e-7)
    assert reading.fits


def mixed_by_hand(smoothing):
    return 2.0 * (P - ((1 - smoothing) * (0.7 * E + 0.3 * E.roll(1, 0)) + smoothing / 3))


@pytest.mark.parametrize(
    ("form", "g"),
    [
        (0.0, FACTORS * (P - E)),
        (0.1, FACTORS * (P - (0.9 * E + 0.1 / 3))),
        (LOG, -FACTORS * E),
        (0.0, mixed_by_hand(0.0)),
        (0.1, mixed_by_hand(0.1)),
        (LOG, -0.7 * E - 0.3 * E.roll(1, 0)),
        # As that of nll_loss of logits: without a positive entry no row looks live, and none is left that does not fit.
        *((0.0, g) for g in (-E, -1.0 - E, 0.0 * E)),
        *((form, P.log() - SURE) for form in (0.0, 0.1, LOG)),
        *((form, torch.nan * E) for form in (0.0, 0.1, LOG)),
    ],
)
def test_a_gradient_of_another_form_has_no_labels(form, g):
    """Rows with factors of their own or with several labels; without a positive entry; of squares; not finite."""
    reading = read(Form(form), P.log(), g, last_scale=torch.tensor(7.0).double())
    assert (bool(reading.fits), float(reading.scale)) == (False, 7.0)
    assert reading.labels.tolist() == [3] * 4


def test_logits_that_are_no_log_probabilities_have_not_the_form_log():
    assert not read(Form(LOG), P.log() + 1.0, -E).fits


def test_rows_that_are_all_certain_have_labels_and_no_scale():
    """All that is left of p - e_y is rounding."""
    rounding = 1e-9 * torch.tensor([[-3, 1, 2], [2, -3, 1], [-3, 2, 1], [1, 2, -3]]).double()
    labels, scale, fits, *_ = read(Form(0.0), 40.0 * E, rounding, last_scale=torch.tensor(7.0).double())
    assert torch.equal(labels, Y)
    assert (bool(fits), float(scale)) == (True, 7.0)


def test_the_tolerance_is_the_rounding_of_the_narrowest_dtype():
    assert tolerance_of(torch.float32, torch.float64) == cross_entropy.TOLERANCE
    assert tolerance_of(torch.float32, torch.float16) == cross_entropy.TOLERANCE
    assert tolerance_of(torch.bfloat16, torch.float32) == 2**-8


@pytest.mark.parametrize("smoothing", [0.05, 0.1 / 1.1, 0.1 / 0.9, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("classes", [2, 4, 10, 100])
def test_any_smoothing_is_fitted_and_the_factor_is_that_of_the_batch(classes, in_float32, dtype, smoothing):
    skip_smoothing_of_torch_2_6(dtype, smoothing)
    z, y = drawn(0, classes, learned=1.0, dtype=dtype)
    (g,) = torch.autograd.grad(256.0 * smoothed(wide(z) if in_float32 else z, y, smoothing), z)
    z = z.detach()
    readings = {form: read(form, z, g) for form in choices(z, g)}
    form = best(readings)
    assert form.smoothing == pytest.approx(smoothing, rel=1e-4 if dtype == torch.float32 else 0.1)
    assert torch.equal(readings[form].labels, y)
    again = read(form, z, 7.0 * g, last_scale=torch.tensor(256.0))
    assert float(again.scale) == pytest.approx(7.0 * 256.0, rel=1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(("classes", "dtype"), [(10, torch.bfloat16), (10, torch.float16), (600, torch.float32)])
@pytest.mark.parametrize("shift", [0.91, 0.95, 1.05, 1.1])
def test_a_batch_may_have_a_smoothing_a_tenth_from_that_of_the_form(shift, classes, dtype):
    z, y = drawn(0, classes, spread=2.0, learned=8.0, dtype=dtype)
    (g,) = torch.autograd.grad(smoothed(z.float(), y, 0.1), z)
    reading = read(Form(0.1 / shift), z.detach(), g)
    assert reading.fits
    assert float(reading.scale) == pytest.approx(1.0, rel=1e-5 if dtype == torch.float32 else 1e-3)
    assert not read(Form(0.1 / (1.0 + 4.0 * (shift - 1.0))), z.detach(), g).fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_predictions_that_are_all_surer_than_smoothed_labels_are_read(classes, dtype):
    """As of a checkpoint that was trained without a smoothing: no entry of g/p is near the factor."""
    z, y = drawn(0, classes, spread=0.7, learned=5.0 + math.log(classes), dtype=dtype)
    (g,) = torch.autograd.grad(8.0 * smoothed(z.float(), y), z)
    z = z.detach()
    assert (g[range(64), y] > 0).all()
    form = best({form: read(form, z, g) for form in choices(z, g)})
    assert form.smoothing == pytest.approx(0.1, rel=1e-4 if dtype == torch.float32 else 0.05)
    for known in (form, Form(0.1)):
        reading = read(known, z, g)
        assert torch.equal(reading.labels, y)
        assert float(reading.scale) == pytest.approx(8.0, rel=1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("smoothing", [0.0975, 0.1, 0.1025])
def test_labels_of_two_classes_where_predictions_are_as_near_to_the_smoothing_as_that_of_the_form(smoothing):
    difference = torch.linspace(2.875, 3.0625, 32)
    y = torch.arange(32) % 2
    z = (difference[:, None] * F.one_hot(y, 2)).bfloat16().requires_grad_()
    (g,) = torch.autograd.grad(smoothed(z.float(), y), z)
    reading = read(Form(smoothing), z.detach(), g)
    assert torch.equal(reading.labels, y)
    assert float(reading.scale) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("classes", "dtype"), [(100, torch.float16), (1000, torch.bfloat16), (600, torch.float32)])
def test_weights_of_rows_show_once_the_model_fits_its_smoothed_labels(classes, dtype):
    """Beside the labels' entries the others are short; they are as long as rounding where a label's would be."""
    y = torch.arange(48) % classes
    torch.manual_seed(0)
    z = (0.9 * F.one_hot(y, classes) + 0.1 / classes).log() + 0.1 * torch.randn(48, classes)
    z = z.to(dtype).requires_grad_()
    losses = F.cross_entropy(z.float(), y, label_smoothing=0.1, reduction="none")
    for weight, fits in ((0.0, True), (0.05, False)):
        (g,) = torch.autograd.grad((losses * torch.linspace(1 - weight, 1 + weight, 48)).mean(), z, retain_graph=True)
        assert read(Form(0.1), z.detach(), g).fits == fits


@pytest.mark.parametrize("shift", [0.95, 1.05])
def test_in_float32_few_classes_have_the_smoothing_of_the_form(shift):
    z, y = drawn(0, 10, learned=3.0)
    (g,) = torch.autograd.grad(smoothed(z, y, 0.1), z)
    assert not read(Form(0.1 * shift), z.detach(), g).fits


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_softmax_is_tried_along_both_layouts(smoothing):
    """On a CPU torch rounds the log-probabilities of bfloat16 otherwise along the last dimension."""
    skip_smoothing_of_torch_2_6(torch.bfloat16, smoothing)
    z, y = drawn(0, 5, rows=256, learned=7.0, dtype=torch.bfloat16)
    rows = {True: z, False: z.reshape(64, 4, 5).transpose(1, 2)}
    for classes_last, logits in rows.items():
        loss = smoothed(logits, y if classes_last else y.reshape(64, 4), smoothing)
        (g,) = torch.autograd.grad(loss, z)
        form = best({form: read(form, z.detach(), g) for form in choices(z.detach(), g)})
        assert (form.in_float32, form.classes_last) == (False, classes_last)


def test_the_tolerance_of_a_row_knows_the_number_of_classes():
    few, many = (rounding_of(True, torch.float32, classes) for classes in (10, 32_000))
    assert few < 2e-6
    assert many == pytest.approx(1e-6 + 32_000 * 2**-24)
    assert rounding_of(True, torch.float64, 32_000) == pytest.approx(1e-6, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_gradient_in_float16_without_a_scaler_is_read_though_most_of_its_entries_are_rounded_to_steps(smoothing):
    z, y = drawn(0, 1000, rows=48, learned=12.0, dtype=torch.float16)
    (g,) = torch.autograd.grad(smoothed(z, y, smoothing), z)
    assert (g.abs() < 2**-14).float().mean() > 0.9
    reading = read(Form(smoothing, in_float32=False), z.detach(), g, last_scale=torch.ones(()))
    assert torch.equal(reading.labels, y)
    assert not read(Form(smoothing, in_float32=False), z.detach(), g * torch.linspace(1, 2, 48)[:, None].half()).fits


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_what_rounding_is_allowed_explains_no_other_gradient(factor):
    """As of a focal loss of a model that fits, which is much smaller than the cross-entropy before it."""
    z, y = drawn(0, 3, learned=4.0, dtype=torch.float64)
    (g,) = torch.autograd.grad(factor * focal(z, y), z)
    certain = (30.0 * F.one_hot(y, 3)).double()  # whose p - q is rounding, while it is certain of the wrong class
    for logits, gradient in ((z.detach(), g), (certain.roll(1, 1), certain - certain.roll(1, 1))):
        reading = read(Form(0.0), logits, factor * gradient, last_scale=torch.ones(()).double())
        assert (bool(reading.fits), float(reading.scale)) == (False, 1.0)


# ---- random losses ---------------------------------------------------------------------------------------------------


@pytest.mark.guard
@pytest.mark.parametrize("readable", [True, False])
def test_random_losses(readable):
    """A choice of the cases of tests/adversary: in trainings, no row has a wrong label, and no scale is off."""
    counts, faults = count(2, 29, readable)
    total = list(counts.values())[-1]
    assert not faults, faults[0]
    if readable:
        assert total["refused"] + total["hardly read"] <= 0.1 * total["cases"]
        assert total["unread"] <= 0.01 * total["rows"]
        assert total["scales"] > 5 * total["cases"]
    else:
        assert total["refused"] >= 1.5 * total["cases"], "of two trainings a case, with each method"


# ---- losses that are no cross-entropies ------------------------------------------------------------------------------


def focal(z, y):
    losses = F.cross_entropy(z, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def smoothed(z, y, smoothing=0.1):
    return F.cross_entropy(z, y, label_smoothing=smoothing)


OTHERS = {
    "binary": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z)),
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z)),
    "advantages": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.linspace(-1, 1, len(y)).to(z)).mean(),
    "smoothing of more than a half": lambda z, y: smoothed(z, y, 0.6),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("classes", [2, 10])
def test_the_gradients_of_other_losses_have_no_labels(name, classes):
    """random_losses has 25 others."""
    z, y = drawn(0, classes, rows=32, spread=2.0)
    assert settle(OTHERS[name](z, y), z) == (None, None)


@pytest.mark.parametrize(
    ("classes", "bias", "loss", "rows"),
    every(5, itertools.product([3, 100], [-4.6, 0.0], ["binary", "squares"], [2, 16])),
)
def test_a_prior_bias_and_tiny_batches_pass_for_no_cross_entropy(classes, bias, loss, rows):
    """A head that begins at the classes' prior probability, as detection heads do."""
    torch.manual_seed(2)
    z, y = (bias + 0.5 * torch.randn(rows, classes)).requires_grad_(), torch.randint(classes, (rows,))
    assert settle(OTHERS[loss](z, y), z) == (None, None)


# ---- what is read ----------------------------------------------------------------------------------------------------

READABLE = {
    "mean": F.cross_entropy,
    "smoothed": smoothed,
    "smoothed, in float32": lambda z, y: smoothed(z.float(), y),
}
TABLE = [
    # Targets that are surer than the smoothed label.
    *itertools.product(["smoothed"], [3, 4, 5, 1000], ["float64"], [1.0, 2.0], [0.0, 3.0, 6.0]),
    # A fresh model, whose logits differ a little: enough for the form, little beside the rounding of the rest.
    *itertools.product(["smoothed, in float32"], [3, 10, 1000], ["bfloat16"], [0.0, 0.02, 0.1, 0.5], [0.0]),
    # Rounded log-probabilities move the probabilities of many classes by per cents.
    *itertools.product(["mean", "smoothed"], [10, 1000], ["bfloat16"], [0.0, 0.1, 1.0, 3.0], [0.0]),
    *itertools.product(["mean", "smoothed"], [20_000], ["bfloat16"], [0.0, 0.1, 1.0], [0.0]),
    ("mean", 20_000, "bfloat16", 3.0, 0.0),
    *itertools.product(["mean", "smoothed"], [2], ["float32"], [0.1, 1.0, 4.0], [0.0]),
]


@pytest.mark.parametrize(
    ("name", "classes", "dtype", "spread", "learned"),
    every(7, TABLE),
)
def test_all_labels_are_read(name, classes, dtype, spread, learned):
    for seed in range(3):
        z, y = drawn(seed, classes, 16 if classes > 1000 else 64, spread, learned, getattr(torch, dtype))
        form, reading = settle(3 * READABLE[name](z, y), z)
        assert torch.equal(reading.labels, y)
        if dtype != "bfloat16":
            assert form == pytest.approx(0.1 * (name == "smoothed"), rel=1e-3)
            assert float(reading.scale) == pytest.approx(3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0])
def test_certain_rows_beside_others_count(dtype, gap):
    """Where the probability of a label rounds to one its gradient is zero, and the row is not an ignored one yet."""
    z, y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(16) % 5
    z[torch.arange(8), y[:8]] += gap
    z.requires_grad_()
    form, reading = settle(4.0 * F.cross_entropy(wide(z), y), z)
    assert form == 0.0
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


@pytest.mark.parametrize("margin", [25.0, 90.0])
def test_a_masked_class_does_not_take_the_labels_of_certain_rows(margin):
    """Its gradient is zero; so is that of a label whose probability rounds to one. The scale is that of the mean."""
    z, y = torch.randn(32, 6), 1 + torch.arange(32) % 5
    z[range(8), y[:8]] += margin
    z[:, 0] = -1e9
    z.requires_grad_()
    form, reading = settle(0.5 * F.cross_entropy(z, y), z)
    assert form == 0.0
    assert ((reading.labels == y) | (reading.labels == 6)).all()
    assert torch.equal(reading.labels[8:], y[8:])
    assert float(reading.scale) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("classes", "learned"),
    every(4, itertools.product([2, 3, 10, 100], [2.0, 5.0, 7.0])),
)
def test_a_cross_entropy_in_bfloat16_itself_of_confident_predictions_has_no_wrong_label(classes, learned):
    """It takes 1 off probabilities that are rounded to bfloat16: too little may be left."""
    for seed in range(20):
        z, y = drawn(seed, classes, 32, learned=learned, dtype=torch.bfloat16)
        _, reading = settle(F.cross_entropy(z, y), z)
        if reading is not None:
            labels = reading.labels
            assert ((labels == y) | (labels == classes)).all()


def test_certain_rows_of_other_losses_do_not_fit_one_by_one():
    """A mixed batch has the gradient of the second labels, and a long row hides the weights of the others."""
    y = torch.arange(16) % 3
    z = 20.0 * F.one_hot(y, 3).float() + torch.linspace(0.0, 1.0, 48).reshape(16, 3)
    long = 5.0 * F.one_hot(y, 3).float() + torch.linspace(0.0, 1.0, 48).reshape(16, 3)
    long[0] = torch.tensor([0.0, 30.0, 0.0])
    second = torch.where(torch.arange(16) < 8, (y + 1) % 3, y)
    plain = (long, F.cross_entropy)
    mixed = (z, lambda z, y: 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, second))
    weighted = (long, lambda z, y: F.cross_entropy(z, y, torch.tensor([1.0, 1.01, 1.02])))
    for (logits, loss), fits in ((plain, True), (mixed, False), (weighted, False)):
        logits = logits.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(logits, y), logits)
        assert is_beyond_doubt(Form(0.0), logits.detach(), g)
        assert each_row_fits(Form(0.0), logits.detach(), g) == fits


def test_certain_rows_that_have_several_forms_are_not_beyond_doubt():
    """Class weights of 1 and 4 are a smoothing of 0.4 of two classes; mixed labels are the second ones."""
    y = torch.arange(16) % 4 // 2
    z = (30.0 * F.one_hot(torch.arange(16) % 2, 2).float()).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(z, y, torch.tensor([1.0, 4.0]), reduction="sum"), z)
    wrong = y != torch.arange(16) % 2
    z = z.detach()[wrong]
    g = g[wrong]
    assert read(Form(0.4), z, g).fits
    assert not is_beyond_doubt(Form(0.4), z, g)
    y = torch.arange(16) % 3
    z = (30.0 * F.one_hot(y, 3).float()).requires_grad_()
    (g,) = torch.autograd.grad(0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, (y + 1) % 3), z)
    z = z.detach()
    assert read(Form(0.0), z, g).fits
    assert not is_beyond_doubt(Form(0.0), z, g)


# ---- two classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_classes_in_half_precision_are_read_once_predictions_differ_by_more_than_rounding(dtype, in_float32):
    """The negated loss is that of the other class with other factors, which are too close to tell before."""
    y = torch.arange(32) % 2
    for spread, is_read in ((0.003, False), (0.06, True), (1.0, True)):
        for seed in range(20):
            z = (spread * torch.randn(32, 2, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()
            for sign in (1, -1):
                form, _ = settle(sign * 64 * F.cross_entropy(z.float() if in_float32 else z, y), z)
                assert (form == 0.0 if sign == 1 else form is None) if is_read else form == NOTHING


@pytest.mark.parametrize("rows", every(2, [4, 16, 64]))
def test_focal_losses_of_two_classes_are_not_read(rows):
    """Every row is on some line, so that nothing tells a row's own factor from another loss."""
    for seed in range(20):
        z, y = drawn(seed, 2, rows)
        assert settle(focal(z, y), z)[1] is None


@pytest.mark.parametrize(
    ("smoothing", "learned", "rows"),
    every(9, itertools.product([0.1, 0.2], [2.0, 3.5, 6.0], [1, 2, 3, 4, 6, 8, 16])),
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
