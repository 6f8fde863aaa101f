"""Distances and the companion's target: values by hand, gradients by autograd; infinities, and batches without rows."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCPOptimizer, distances
from dcl_optim.penalty.distances import DISTANCES, companion_target
from dcl_optim.penalty.pull import pull_of, pull_towards_target
from dcl_optim.pytorch.internals import constant
from tests.helpers import CLASSES, FEATURES, assert_same, batches, fit, huber, mlp, one, sgd
from tests.reference import CLOSE, EACH, EACH_WAY, VARIANTS, assert_same_training, loss_of, term_of, wrap

INF, NAN = float("inf"), float("nan")
LOG_3 = math.log(3.0)


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def random_rows(rows=5, classes=7):
    """The first row is far apart: beyond the radius of mse, seen from both sides of a target."""
    generator = torch.Generator().manual_seed(0)
    z, c = torch.randn(2, rows, classes, generator=generator, dtype=torch.float64)
    z[0] *= 40
    return z, c


FUNCTIONS = DISTANCES | {huber: huber}

# ---- the formulas ----------------------------------------------------------------------------------------------------


def test_squared_and_l1_by_hand():
    z, c = double([1, 3], [0, -2]), double([0, 1], [0, 2])
    assert distances.squared(z, c).tolist() == pytest.approx([(1 + 4) / 2, 16 / 2], rel=1e-15)
    assert distances.l1(z, c).tolist() == [(1 + 2) / 2, 4 / 2]


def test_mse_by_hand():
    """Two classes: rows 0.5, 4 and sqrt 2 apart, that is near, far and at the distance sqrt 2 where both forms meet."""
    z, c = double([0.3, 0.4], [0, -2], [1, 1]), double([0, 0], [0, 2], [0, 0])
    expected = [0.25 / 2, (2 * 4 - math.sqrt(2)) * math.sqrt(2) / 2, 1.0]
    assert distances.mse(z, c).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_far_out_the_gradient_of_mse_is_as_long_as_a_cross_entropys_longest(classes):
    """That of a row whose prediction is certain and wrong; and half as far out, half as long as at the border."""
    z, c = torch.zeros(2, classes, dtype=torch.float64), torch.zeros(2, classes, dtype=torch.float64)
    z[0, 0], z[1, 1] = 1e6, 0.5 * classes / math.sqrt(2)
    leaf = z.clone().requires_grad_()
    distances.mse(leaf, c).sum().backward()
    wrong = z[:1].clone().requires_grad_()
    F.cross_entropy(wrong, torch.tensor([1])).backward()
    assert leaf.grad.norm(dim=1).tolist() == pytest.approx([wrong.grad.norm().item(), math.sqrt(2) / 2], rel=1e-12)


def test_for_one_output_mse_is_squared_however_far():
    z, c = double([3], [-70]), double([0], [0])
    assert distances.mse(z, c).tolist() == distances.squared(z, c).tolist() == [9, 4900]


def test_kl_by_hand():
    """One row, T = 2: KL of (1/2, 1/2) against softmax(0, ln 9 / 2) = (1/4, 3/4)."""
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert distances.kl(double([0, 2 * LOG_3]), double([0, 0]), temperature=2.0).tolist() == [pytest.approx(expected)]


def test_infonce_by_hand():
    """Rows along the axes; the second prediction points the wrong way. Cosines (1, 0) and (0, -1), T = 1/2."""
    expected = [-math.log(math.exp(2) / (math.exp(2) + 1)), -math.log(math.exp(-2) / (1 + math.exp(-2)))]
    z, c = double([3, 0], [0, 5]), double([1, 0], [0, -2])
    assert distances.infonce(z, c, temperature=0.5).tolist() == pytest.approx(expected, rel=1e-12)
    # A third row without a prototype is none that the others may find.
    z, c = torch.cat([z, double([1, 1])]), torch.cat([c, double([0, 0])])
    assert distances.infonce(z, c, temperature=0.5)[:2].tolist() == pytest.approx(expected, rel=1e-12)


# ---- rows and gradients ----------------------------------------------------------------------------------------------


def by_rows(distance, z, c):
    """The sum over rows."""
    return pull_of(distance, z, c, torch.ones(len(z), dtype=z.dtype), number=1)


def test_a_distance_that_was_first_called_in_inference_mode_is_differentiable_later():
    constant.cache_clear()
    with torch.inference_mode():
        distances.mse(*random_rows())
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, distance=lambda z, c: 0.5 * distances.mse(z, c))
    fit(optimizer, batches(2))
    assert optimizer.logs()["penalty"] > 0


def gradient_of(found):
    return found.gradient(found.slope.shape, found.slope.dtype, 1, 1.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_values_of_the_function_and_its_gradient(name):
    function, (z, c) = FUNCTIONS[name], random_rows()
    leaf = z.clone().requires_grad_()
    values = function(leaf, c)
    assert torch.autograd.gradcheck(lambda z: function(z, c), leaf)
    values.sum().backward()
    found = by_rows(function, z, c)
    assert_same(found.value(), values.detach().sum(), rtol=1e-14)
    assert_same(gradient_of(found), leaf.grad, rtol=1e-12, atol=1e-16)
    if name != "infonce":
        alone = [function(z[i : i + 1], c[i : i + 1]) for i in range(len(z))]
        assert_same(found.value(), torch.cat(alone).sum(), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_written_to_the_logits_and_half_precision_is_lifted(name, dtype):
    given = [rows.to(dtype) for rows in random_rows()]
    z, c = (rows.clone() for rows in given)
    found = by_rows(FUNCTIONS[name], z, c)
    assert found.value().dtype == found.slope.dtype == torch.float32
    exact = by_rows(FUNCTIONS[name], *(rows.double() for rows in given))
    assert_same(gradient_of(found).double(), gradient_of(exact), rtol=1e-4, atol=5e-6)
    pull_towards_target(FUNCTIONS[name], z, c, found, 0.6)
    assert_same([z, c], given)


@pytest.mark.parametrize(
    ("distance", "found"),
    [(F.mse_loss, r"\(\)"), (lambda z, c: z - c, r"\(16, 5\)"), (lambda z, c: 0.0, "float")],
    ids=["a scalar", "all entries", "no tensor"],
)
@EACH_WAY
@EACH
def test_a_function_that_does_not_return_one_value_a_row_is_refused_at_first_use(variant, way, distance, found):
    model = mlp()
    optimizer = wrap(variant, model, distance=distance)
    message = rf"must return one value a row, of shape \(16,\), but returned {found}; leave"
    with pytest.raises(ValueError, match=message):
        loss_of(optimizer, *one(), way).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- the companion's target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_gradient_towards_the_target_is_that_of_the_distance_to_it(name, alpha):
    function, (z, c) = FUNCTIONS[name], random_rows()
    leaf = c.clone().requires_grad_()
    function(leaf, alpha * c + (1 - alpha) * z).mean().backward()
    found = pull_towards_target(function, z, c, pull_of(function, z, c), alpha)
    assert_same(gradient_of(found), leaf.grad, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_target_by_hand_and_masked_where_the_logits_are(dtype):
    z, c = torch.tensor([[8.0, -INF]], dtype=dtype), torch.tensor([[0.0, -INF]], dtype=dtype)
    for alpha, expected in ((0.0, 8.0), (0.75, 2.0), (1.0, 0.0)):
        target = companion_target(z, c, alpha)
        assert target.tolist() == [[expected, -INF]]
        assert target.dtype.itemsize >= 4


def test_the_target_is_exactly_the_prediction_where_the_model_agrees():
    """At the first step of a copy the companion's gradient is zero, and no rounding of it."""
    z = torch.randn(100, 7, dtype=torch.float64)
    for alpha in torch.rand(20).tolist():
        assert torch.equal(companion_target(z, z.clone(), alpha), z)


# ---- logits that are not finite --------------------------------------------------------------------------------------


SIDE = 1.0 / (1.0 + math.e)  # of two rows that point at their own predictions, what the other one's pulls at each

# By hand: name, options, z, c, the values, and their gradient with respect to z.
MASKED_IN_BOTH = [
    ("squared", {}, [[1, -INF, 3]], [[0, -INF, 1]], 5 / 3, [[2 / 3, 0, 4 / 3]]),
    ("mse", {}, [[1, -INF, 2]], [[0, -INF, 1]], 2 / 3, [[2 / 3, 0, 2 / 3]]),
    ("mse", {}, [[1, INF, 2]], [[0, INF, 1]], 2 / 3, [[2 / 3, 0, 2 / 3]]),
    ("l1", {}, [[1, -INF, 3]], [[0, -INF, 4]], 2 / 3, [[1 / 3, 0, -1 / 3]]),
    ("kl", {"temperature": 1}, [[0, -INF, LOG_3]], [[0, -INF, 0]], 0.5 * math.log(4 / 3), [[-0.25, 0, 0.25]]),
    ("kl", {"temperature": 2}, [[0, -INF, 2 * LOG_3]], [[0, 5, 0]], 0.5 * math.log(4 / 3), [[-0.125, 0, 0.125]]),
    (
        "infonce",
        {"temperature": 1},
        [[1, -INF, 0], [0, -INF, 1]],
        [[1, -INF, 0], [0, -INF, 1]],
        math.log(1 + 1 / math.e),
        [[0, 0, SIDE], [SIDE, 0, 0]],
    ),
]


@pytest.mark.parametrize(("name", "options", "z", "c", "value", "gradient"), MASKED_IN_BOTH)
def test_a_class_that_is_masked_in_both(name, options, z, c, value, gradient):
    found = by_rows(partial(FUNCTIONS[name], **options) if options else FUNCTIONS[name], double(*z), double(*c))
    assert found.value().item() == pytest.approx(value * len(z), rel=1e-12)
    assert_same(gradient_of(found), double(*gradient), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["kl", "infonce"])
def test_a_class_that_is_masked_in_the_prediction_alone_counts_for_nothing(name):
    z, c = random_rows()
    alone = by_rows(FUNCTIONS[name], z, c.index_fill(1, torch.tensor([0]), -INF))
    both = by_rows(FUNCTIONS[name], *(rows.index_fill(1, torch.tensor([0]), -INF) for rows in (z, c)))
    assert alone.value() == both.value()
    assert_same(alone.slope, both.slope)


@pytest.mark.parametrize("broken", [-INF, INF, NAN])
@pytest.mark.parametrize("name", ["mse", "squared", "l1"])
def test_an_entry_that_is_not_finite_on_one_side_contributes_nothing(name, broken):
    z, c = double([2, 4, 3]), double([1, broken, 2])
    for pair, sign in (((z, c), 1), ((c, z), -1)):
        found = by_rows(FUNCTIONS[name], *pair)
        assert found.value().item() == pytest.approx(2 / 3, rel=1e-15)
        expected = [1 / 3, 0, 1 / 3] if name == "l1" else [2 / 3, 0, 2 / 3]
        assert_same(gradient_of(found), sign * double(expected), rtol=1e-15)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_prediction_that_is_not_finite_has_no_gradient_that_spoils_the_models(name):
    """That of a companion that has diverged."""
    z, c = random_rows()
    assert by_rows(FUNCTIONS[name], z, c.index_fill(0, torch.tensor([1]), NAN)).slope.isfinite().all()


# ---- batches without rows --------------------------------------------------------------------------------------------


EMPTY = torch.empty(0, FEATURES, dtype=torch.float64), torch.empty(0, dtype=torch.long)


def loss_by(way, optimizer, z, y):
    labels = F.one_hot(y, CLASSES).double() if way == "term, soft labels" else y
    smoothing = 0.1 if way == "line, smoothing" else 0.0
    loss = F.cross_entropy(z, y, reduction="sum", label_smoothing=smoothing) / 16
    return loss + term_of(optimizer, way.partition(",")[0])(z, labels)


@pytest.mark.parametrize(
    ("variant", "way", "distance"),
    [
        *((variant, way, "mse") for variant in VARIANTS for way in ("line", "line, smoothing")),
        *((variant, "term", distance) for variant in VARIANTS for distance in ("mse", "kl", "infonce")),
        ("dcp", "term, soft labels", "mse"),
    ],
)
def test_a_batch_without_rows_beside_others_changes_nothing(variant, way, distance):
    found = []
    for with_empty in (False, True):
        model = mlp()
        optimizer = wrap(variant, model, distance=distance)
        for batch in batches(4):
            optimizer.zero_grad()
            for x, y in [EMPTY, batch, EMPTY] if with_empty else [batch]:
                loss_by(way, optimizer, model(x), y).backward()
            optimizer.step()
        found.append(optimizer)
    assert_same_training(*found, **CLOSE)


@EACH_WAY
@EACH
def test_a_step_on_no_rows_at_all_is_the_plain_optimizers(variant, way):
    model, plain = mlp(), mlp()
    optimizer, theirs = wrap(variant, model), sgd(plain)
    for _ in range(2):
        optimizer.zero_grad()
        loss_by(way, optimizer, model(EMPTY[0]), EMPTY[1]).backward()
        optimizer.step()
        theirs.zero_grad()
        loss_by("line", theirs, plain(EMPTY[0]), EMPTY[1]).backward()
        theirs.step()
    assert_same(model, plain)
    assert not optimizer.logs()["penalty"] > 0.0
