"""Distances and the companion's target: values by hand, gradients by autograd; infinities, and batches without rows."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from dcl_optim.distances import DISTANCES, companion_target, from_rows, resolve_distance, to_rows
from dcl_optim.forecaster import Penalty
from dcl_optim.reference import dcl_step
from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, sgd, train

INF, NAN = float("inf"), float("nan")
LOG_3 = math.log(3.0)
Z = torch.tensor([[1.0, 3.0], [0.0, -2.0]], dtype=torch.float64)
C = torch.tensor([[0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)


def double(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_rows(rows: int = 5, classes: int = 7) -> tuple[Tensor, Tensor]:
    """The first row is far apart: beyond the radius of mse, seen from both sides of a target."""
    generator = torch.Generator().manual_seed(0)
    z, c = torch.randn(2, rows, classes, generator=generator, dtype=torch.float64)
    z[0] *= 40
    return z, c


def huber(z: Tensor, c: Tensor) -> Tensor:
    return F.smooth_l1_loss(z, c)


ALL = [*DISTANCES, huber]
FUNCTIONS = {name: getattr(distances, name) for name in DISTANCES} | {huber: huber}


# ---- the formulas ----------------------------------------------------------------------------------------------------


def test_squared_and_l1_by_hand():
    assert distances.squared(Z, C).item() == (1 + 4 + 0 + 16) / 4
    assert distances.l1(Z, C).item() == (1 + 2 + 0 + 4) / 4


def test_mse_by_hand():
    """Two classes: rows 0.5, 4 and sqrt 2 apart, that is near, far and at the distance sqrt 2 where both forms meet."""
    z, c = double([0.3, 0.4], [0, -2], [1, 1]), double([0, 0], [0, 2], [0, 0])
    expected = (0.25 + (2 * 4 - math.sqrt(2)) * math.sqrt(2) + 2) / (3 * 2)
    assert distances.mse(z, c).item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_far_out_the_gradient_of_mse_is_as_long_as_a_cross_entropys_longest(classes):
    """That of a row whose prediction is certain and wrong; and half as far out, half as long as at the border."""
    z, c = torch.zeros(2, classes, dtype=torch.float64), torch.zeros(2, classes, dtype=torch.float64)
    z[0, 0], z[1, 1], at_border = 1e6, 0.5 * classes / math.sqrt(2), math.sqrt(2) / 2
    leaf = z.clone().requires_grad_()
    distances.mse(leaf, c).backward()
    wrong = z[:1].clone().requires_grad_()
    (0.5 * F.cross_entropy(wrong, torch.tensor([1]))).backward()
    assert leaf.grad.norm(dim=1).tolist() == pytest.approx([wrong.grad.norm().item(), 0.5 * at_border], rel=1e-12)


def test_for_one_output_mse_is_squared_however_far():
    z, c = double([3], [-70]), double([0], [0])
    assert distances.mse(z, c) == distances.squared(z, c) == (9 + 4900) / 2


def test_kl_by_hand():
    """One row, T = 2: KL of (1/2, 1/2) against softmax(0, ln 9 / 2) = (1/4, 3/4)."""
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert distances.kl(double([0, 2 * LOG_3]), double([0, 0]), temperature=2.0).item() == pytest.approx(expected)


def test_infonce_by_hand():
    """Rows along the axes; the second prediction points the wrong way. Cosines (1, 0) and (0, -1), T = 1/2."""
    first = -math.log(math.exp(2) / (math.exp(2) + 1))
    second = -math.log(math.exp(-2) / (1 + math.exp(-2)))
    found = distances.infonce(double([3, 0], [0, 5]), double([1, 0], [0, -2]), temperature=0.5)
    assert found.item() == pytest.approx((first + second) / 2, rel=1e-12)


def test_in_infonce_rows_of_z_look_for_rows_of_c():
    """Both predictions are the same row: in the other direction each would be found with certainty, or not at all."""
    assert distances.infonce(double([3, 0], [0, 5]), double([1, 0], [2, 0])).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("distance", "options", "function"),
    [
        ("mse", {}, distances.mse),
        ("squared", {}, distances.squared),
        ("l1", {}, distances.l1),
        ("kl", {}, partial(distances.kl, temperature=4.0)),
        ("kl", {"temperature": 1.5}, partial(distances.kl, temperature=1.5)),
        ("infonce", {}, partial(distances.infonce, temperature=0.1)),
        ("infonce", {"temperature": 2}, partial(distances.infonce, temperature=2.0)),
        (huber, {}, huber),
    ],
    ids=["mse", "squared", "l1", "kl", "kl by temperature", "infonce", "infonce by temperature", "a function"],
)
def test_what_a_user_writes_is_the_function(distance, options, function):
    found = resolve_distance(distance, **options).rows(*random_rows())
    assert_same(found.distances.mean(), function(*random_rows()), rtol=1e-14)
    assert str(resolve_distance(distance, **options)) == getattr(distance, "__name__", distance)


def test_a_distance_that_was_resolved_is_taken_as_it_is():
    chosen = resolve_distance("kl", 2.0)
    assert resolve_distance(chosen) is chosen


# ---- rows and gradients ----------------------------------------------------------------------------------------------


def gradient_of(found: distances.Rows) -> Tensor:
    """Of the mean over rows."""
    return Penalty(found, len(found.slope)).added_to(torch.zeros_like(found.slope), 1.0, 1.0, 1)


def test_rows_of_squared_and_l1_by_hand():
    squared, absolute = (resolve_distance(name).rows(Z, C) for name in ("squared", "l1"))
    assert_same(squared.distances, torch.tensor([5 / 2, 16 / 2], dtype=torch.float64), rtol=1e-15)
    assert_same(squared.slope * squared.factor, Z - C)
    assert absolute.distances.tolist() == [3 / 2, 4 / 2]
    assert (absolute.slope * absolute.factor).tolist() == [[0.5, 0.5], [0.0, -0.5]]


@pytest.mark.parametrize("name", ALL)
def test_rows_have_the_mean_of_the_function_and_its_gradient(name):
    function, (z, c) = FUNCTIONS[name], random_rows()
    leaf = z.clone().requires_grad_()
    value = function(leaf, c)
    assert torch.autograd.gradcheck(lambda z: function(z, c), leaf)
    value.backward()
    found = resolve_distance(name).rows(z, c)
    assert_same(found.distances.mean(), value.detach(), rtol=1e-14)
    assert_same(gradient_of(found), leaf.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("name", ["mse", "squared", "l1", "kl"])
def test_a_row_does_not_depend_on_the_others(name):
    distance, (z, c) = resolve_distance(name), random_rows()
    alone = [distance.rows(z[i : i + 1], c[i : i + 1]) for i in range(len(z))]
    found = distance.rows(z, c)
    assert not distance.couples_rows
    assert_same(found.distances, torch.cat([row.distances for row in alone]), rtol=1e-14)
    assert_same(found.slope, torch.cat([row.slope for row in alone]), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_written_to_the_logits_and_half_precision_is_lifted(name, dtype):
    given = [rows.to(dtype) for rows in random_rows()]
    z, c = (rows.clone() for rows in given)
    found = resolve_distance(name).rows(z, c)
    assert found.values.dtype == found.slope.dtype == torch.float32
    exact = resolve_distance(name).rows(*(rows.double() for rows in given))
    assert_same(gradient_of(found).double(), gradient_of(exact), rtol=1e-4, atol=1e-6)
    resolve_distance(name).towards_target(z, c, found, 0.6)
    assert_same([z, c], given)


def test_a_custom_distance_may_keep_what_it_was_called_with():
    kept = []

    def distance(z: Tensor, c: Tensor) -> Tensor:
        kept.append((c, c.clone()))
        return F.mse_loss(z, c)

    model = mlp()
    train(model, DCPOptimizer(sgd(model), model, CLASSES, distance=distance), list(batches(1)) * 5)
    assert len(kept) == 4
    for held, copied in kept:
        assert_same(held, copied)


# ---- the companion's target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_gradient_towards_the_target_is_that_of_the_distance_to_it(name, alpha):
    distance, (z, c) = resolve_distance(name), random_rows()
    leaf = c.clone().requires_grad_()
    FUNCTIONS[name](leaf, alpha * c + (1 - alpha) * z).backward()
    found = distance.towards_target(z, c, distance.rows(z, c), alpha)
    assert_same(gradient_of(found), leaf.grad, rtol=1e-12, atol=1e-14)


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


# ---- what alpha does under each optimizer ----------------------------------------------------------------------------


PLAIN = partial(torch.optim.SGD, lr=0.1)
# An eps as large as the companion's gradients: alpha counts, and to slow the step as well would count it twice.
LARGE_EPS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
}
NO_EPS = {
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-30),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-30),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, eps=1e-30, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-30),
}


def flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def moved(make, alpha, steps=1, **options):
    """How far a companion goes that starts apart from the model. Without a penalty the models of all runs agree."""
    model, companion = mlp(seed=3), mlp(seed=4)
    optimizer = DCLOptimizer(make(model.parameters()), model, alpha=alpha, weight=0.0, companion=companion, **options)
    train(model, optimizer, batches(steps))
    return flat(companion) - flat(mlp(seed=4))


def gradient_at_alpha_zero():
    """The companion's first one."""
    model, companion = mlp(seed=3), mlp(seed=4)
    (x, _), *_ = batches(1)
    F.mse_loss(companion(x), model(x).detach()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in companion.parameters()])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_under_sgd_alpha_scales_the_companions_step_by_one_minus_alpha(alpha):
    expected = -0.1 * (1 - alpha) * gradient_at_alpha_zero()
    torch.testing.assert_close(moved(PLAIN, alpha), expected, rtol=1e-9, atol=1e-15)


def test_with_a_large_eps_alpha_acts_in_the_gradient_only():
    """The first step written out: lr g / (|g| + eps) and lr g / (|g| / 10 + eps), lr being the base's."""
    g, decay = 0.7 * gradient_at_alpha_zero(), 1e-2 * flat(mlp(seed=4))
    expected = {"adamw": -0.01 * (g / (g.abs() + 1e-3) + decay), "rmsprop": -0.01 * g / (0.1 * g.abs() + 1e-3)}
    for name, make in LARGE_EPS.items():
        torch.testing.assert_close(moved(make, 0.3), expected[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", LARGE_EPS)
def test_with_a_large_eps_the_run_is_the_references(name):
    make, model = LARGE_EPS[name], mlp()
    hand, companion = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = DCLOptimizer(make(model.parameters()), model, alpha=0.3, weight=0.7)
    train(model, optimizer, batches(20))
    base, second = make(hand.parameters()), make(companion.parameters())
    for x, y in batches(20):
        dcl_step(hand, companion, base, second, x, y, F.cross_entropy, distances.mse, weight=0.7, alpha=0.3)
    assert_same(model, hand, rtol=1e-9, atol=1e-12)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NO_EPS)
def test_without_eps_a_constant_alpha_has_no_effect(name):
    low, high = (moved(NO_EPS[name], alpha, steps=20) for alpha in (0.1, 0.9))
    assert low.abs().max() > 0.05
    assert_same(low, high, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [PLAIN, NO_EPS["adam"]])
def test_the_companions_pace_is_companion_lr_scale_under_any_optimizer(make):
    full, quarter = moved(make, 0.5), moved(make, 0.5, companion_lr_scale=0.25)
    assert full.abs().max() > 1e-3
    torch.testing.assert_close(quarter, 0.25 * full, rtol=1e-9, atol=1e-15)


def test_a_schedule_of_alpha_is_followed():
    """Alpha 1 but for the third step: a companion without momentum moves there only."""
    model = mlp()
    optimizer = DCLOptimizer(PLAIN(model.parameters()), model, alpha=lambda step: 0.5 if step == 3 else 1.0, weight=1.0)
    found = []
    for batch in batches(5):
        before = flat(optimizer.companion)
        train(model, optimizer, [batch])
        found.append(not torch.equal(before, flat(optimizer.companion)))
    assert found == [False, False, True, False, False]


def test_under_adam_with_alpha_one_a_copy_that_has_not_moved_rests():
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, alpha=1.0, weight=1.0)
    train(model, optimizer, batches(5))
    assert_same(optimizer.companion, mlp())


# ---- a step that is no longer than the loss's ------------------------------------------------------------------------


def largest_loss(make, lr: float) -> float:
    """Of 100 steps of a linear head on 512 features of squared length 200: a probe of ten classes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (512,), generator=generator)
    features = (torch.randn(512, 512, generator=generator) + torch.randn(10, 512, generator=generator)[y]).relu()
    features *= (200 / features.square().sum(1).mean()).sqrt()
    torch.manual_seed(0)
    head, losses = nn.Linear(512, 10), []
    optimizer = make(torch.optim.SGD(head.parameters(), lr=lr, momentum=0.9), head)
    for _ in range(100):
        batch = torch.randperm(512, generator=generator)[:64]
        optimizer.zero_grad()
        loss = F.cross_entropy(head(features[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return max(losses) if math.isfinite(sum(losses)) else INF


PROBES = {
    "DCP": partial(DCPOptimizer, update="rows"),
    "DCP, weight 1": partial(DCPOptimizer, weight=1.0),
    "DCL": DCLOptimizer,
    "DCL, weight 1": partial(DCLOptimizer, weight=1.0),
}


@pytest.mark.parametrize("lr", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", PROBES)
def test_a_penalty_by_mse_stays_bounded_where_plain_training_does(name, lr):
    assert largest_loss(lambda base, head: base, lr) < 10
    assert largest_loss(PROBES[name], lr) < 1000


@pytest.mark.filterwarnings("ignore:non-finite logits", "ignore:the companion's logits were not finite")
@pytest.mark.parametrize("name", ["DCP, weight 1", "DCL"])
def test_a_penalty_by_the_papers_distance_does_not(name):
    assert largest_loss(partial(PROBES[name], distance="squared"), 1.0) > 1e6


# ---- logits that are not finite --------------------------------------------------------------------------------------


SIDE = 0.5 / (1.0 + math.e)  # of two rows that point at their own predictions, what the other one's pulls at each

# By hand: name, options, z, c, the value, and its gradient with respect to z.
MASKED_IN_BOTH = [
    ("squared", {}, [[1, -INF, 3]], [[0, -INF, 1]], 5 / 3, [[2 / 3, 0, 4 / 3]]),
    ("mse", {}, [[1, -INF, 2]], [[0, -INF, 1]], 2 / 3, [[2 / 3, 0, 2 / 3]]),
    ("mse", {}, [[1, INF, 2]], [[0, INF, 1]], 2 / 3, [[2 / 3, 0, 2 / 3]]),
    ("l1", {}, [[1, -INF, 3]], [[0, -INF, 4]], 2 / 3, [[1 / 3, 0, -1 / 3]]),
    ("kl", {"temperature": 1}, [[0, -INF, LOG_3]], [[0, -INF, 0]], 0.5 * math.log(4 / 3), [[-0.25, 0, 0.25]]),
    ("kl", {"temperature": 2}, [[0, -INF, 2 * LOG_3]], [[0, -INF, 0]], 0.5 * math.log(4 / 3), [[-0.125, 0, 0.125]]),
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
    z, c, gradient = double(*z), double(*c), double(*gradient)
    function, leaf = partial(FUNCTIONS[name], **options), z.clone().requires_grad_()
    function(leaf, c).backward()
    found = resolve_distance(name, **options).rows(z, c)
    for mean, slope in ((function(z, c), leaf.grad), (found.distances.mean(), gradient_of(found))):
        assert mean.item() == pytest.approx(value, rel=1e-12)
        assert_same(slope, gradient, rtol=1e-12, atol=1e-15)


def test_a_class_that_the_prediction_alone_rules_out_is_pushed_down_by_kl():
    """It has no share in the value, and its gradient is the model's probability."""
    distance = resolve_distance("kl", temperature=1.0)
    found = distance.rows(double([0, 0, 0]), double([0, -INF, 0]))
    assert found.distances.item() == pytest.approx(math.log(1.5))
    assert_same(gradient_of(found), double([-1 / 6, 1 / 3, -1 / 6]), rtol=1e-12)


@pytest.mark.parametrize("broken", [-INF, INF, NAN])
@pytest.mark.parametrize("name", ["mse", "squared", "l1"])
def test_an_entry_that_is_not_finite_on_one_side_contributes_nothing(name, broken):
    distance, z, c = resolve_distance(name), double([2, 4, 3]), double([1, broken, 2])
    for pair, sign in (((z, c), 1), ((c, z), -1)):
        found = distance.rows(*pair)
        assert found.distances.item() == pytest.approx(2 / 3, rel=1e-15)
        expected = [1 / 3, 0, 1 / 3] if name == "l1" else [2 / 3, 0, 2 / 3]
        assert_same(gradient_of(found), sign * double(expected), rtol=1e-15)
        assert FUNCTIONS[name](*pair).item() == pytest.approx(2 / 3, rel=1e-15)


@pytest.mark.parametrize("name", ["mse", "squared", "l1", "kl"])
def test_a_row_of_nan_contributes_nothing(name):
    """It is the prototype of rows without a label."""
    distance, (z, c) = resolve_distance(name), random_rows()
    whole, broken = distance.rows(z, c), c.index_fill(0, torch.tensor([1]), NAN)
    for pair in ((z, broken), (broken, z)):
        found = distance.rows(*pair)
        assert found.distances[1] == 0
        assert not found.slope[1].any()
    found = distance.rows(z, broken)
    others = torch.tensor([0, 2, 3, 4])
    assert_same(found.distances[others], whole.distances[others])
    assert_same(found.slope[others], whole.slope[others])


@pytest.mark.parametrize("distance", ["infonce", huber])
def test_a_mean_that_is_not_finite_has_no_gradient_that_spoils_the_models(distance):
    """The prediction of a companion that has diverged."""
    z, c = random_rows()
    assert resolve_distance(distance).rows(z, c.index_fill(0, torch.tensor([1]), NAN)).slope.isfinite().all()


class Masked(nn.Module):
    """Its last two classes are masked, as a vocabulary is padded, or left out altogether."""

    def __init__(self, masked: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES + 2)).double()
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return torch.cat([z[:, :CLASSES], z[:, CLASSES:] - INF], 1) if self.masked else z[:, :CLASSES]


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
@pytest.mark.parametrize("name", DISTANCES)
def test_a_masked_model_trains_as_one_of_its_other_classes(name, variant):
    """Where the mean is over all classes, the weight makes up for it, and so does the companion's learning rate; all
    rows are near each other, as seen by mse."""
    found = []
    share = CLASSES / (CLASSES + 2) if name in ("mse", "squared", "l1") else 1.0
    for masked, weight, lr_scale in ((0, 0.5 * share, share), (2, 0.5, 1.0)):
        model = Masked(masked)
        options = {"weight": weight, "alpha": 0.4, "distance": name}
        if variant == "dcl":
            optimizer = DCLOptimizer(sgd(model), model, companion_lr_scale=lr_scale, **options)
        else:
            optimizer = DCPOptimizer(sgd(model), model, CLASSES + masked, **options)
        train(model, optimizer, batches(12))
        learned = optimizer.companion.net.state_dict() if variant == "dcl" else optimizer.prototypes[:CLASSES, :CLASSES]
        penalty = torch.tensor(weight * optimizer.penalty, dtype=torch.float64)
        found.append((model.net.state_dict(), learned, penalty))
    assert_same(*found, rtol=1e-7, atol=1e-9)


# ---- batches without rows --------------------------------------------------------------------------------------------


EMPTY = torch.empty(0, FEATURES, dtype=torch.float64), torch.empty(0, dtype=torch.long)


def summed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


def squares(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, F.one_hot(y, CLASSES).to(z), reduction="sum")


def wrapped(variant: str, model: nn.Module, **options):
    if variant == "dcl":
        return DCLOptimizer(sgd(model), model, **{"weight": 1.0} | options)
    return DCPOptimizer(sgd(model), model, CLASSES, **{"weight": 1.0, "alpha": 0.6} | options)


def trained(variant: str, with_empty: bool, loss=summed, soft=False, **options):
    model = mlp()
    optimizer = wrapped(variant, model, **options)
    for batch in batches(4):
        optimizer.zero_grad()
        for x, y in [EMPTY, batch, EMPTY] if with_empty else [batch]:
            if variant == "dcp" and soft is not None:
                optimizer.set_targets(F.one_hot(y, CLASSES).double() if soft else y)
            (loss(model(x), y) / 16).backward()
        optimizer.step()
    learned = optimizer.companion if variant == "dcl" else optimizer.prototypes
    return model.state_dict(), learned.state_dict() if variant == "dcl" else learned


SCRIPTS = {
    "DCL, scale read": ("dcl", {}),
    "DCL, scale not readable": ("dcl", {"loss": squares}),
    **{f"DCL, {distance}": ("dcl", {"distance": distance, "loss_scale": 1 / 16}) for distance in DISTANCES},
    "DCP, labels read": ("dcp", {"soft": None}),
    "DCP, soft labels": ("dcp", {"soft": True}),
    **{f"DCP, {distance}": ("dcp", {"distance": distance, "loss_scale": 1 / 16}) for distance in DISTANCES},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_batch_without_rows_beside_others_changes_nothing(name):
    variant, options = SCRIPTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if options.get("loss") is squares else "error")  # of the batch itself
        found = [trained(variant, with_empty, **options) for with_empty in (False, True)]
    assert_same(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1.0}, {"loss_scale": 1.0, "distance": "infonce"}], ids=str)
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_step_on_no_rows_at_all_is_the_plain_optimizers(variant, options):
    model, plain = mlp(), mlp()
    optimizer = wrapped(variant, model, **options)
    theirs = sgd(plain)
    for _ in range(2):
        for network, its in ((model, optimizer), (plain, theirs)):
            if network is model and variant == "dcp":
                optimizer.set_targets(EMPTY[1])
            its.zero_grad()
            summed(network(EMPTY[0]), EMPTY[1]).backward()
            its.step()
    assert_same(model, plain)
    assert not optimizer.penalty > 0.0


# ---- layout ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_rows_and_back(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1)) if len(shape) > 1 else 1
    tensor = torch.randn(*shape)
    rows = to_rows(tensor, dim)
    assert rows.shape[1] == (tensor.shape[dim] if len(shape) > 1 else 1)
    assert torch.equal(from_rows(rows, tensor.shape, dim), tensor)


def test_a_row_holds_the_classes_of_one_prediction():
    tensor = torch.arange(24).reshape(2, 3, 4)
    assert to_rows(tensor, 1)[1].tolist() == tensor[0, :, 1].tolist()
    assert to_rows(tensor, -1)[1].tolist() == tensor[0, 1].tolist()
