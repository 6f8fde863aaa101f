"""What each forward pass counts for in the companion's step, also where factors are 0 or negative; room in float16."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dcl_optim import DCLOptimizer
from dcl_optim.companion.weighting import WeightedMean
from dcl_optim.distances import Rows
from tests.helpers import assert_same, batches, cells, mlp, sgd, unreadable_device, wrap

ONE, TWO = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 8.0]])


# ---- the mean --------------------------------------------------------------------------------------------------------


def rows(slope: torch.Tensor, factor: float = 1.0, radius: float = math.inf) -> Rows:
    return Rows(slope.norm(dim=1), slope, factor, True, radius)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["numbers", "tensors"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((8.0,), ONE),
        ((3.0, 1.0), (3 * ONE + TWO) / 4),
        ((-3.0, 1.0), (3 * ONE + TWO) / 4),
        ((0.0, 5.0), TWO),
        ((5.0, 0.0), ONE),
        ((0.0, 0.0), 0 * ONE),
        ((0.0,), 0 * ONE),
    ],
)
def test_mean_of_gradients(factors, expected, half, kind):
    mean, summed = WeightedMean(), torch.zeros(1, 2)
    for gradient, factor in zip((ONE, TWO), factors, strict=False):
        summed += mean.weigh(rows(gradient.clone(), 0.5), 1, kind(factor if kind is float else abs(factor)), half)
    mean.divide([summed])
    assert_same(summed, 0.5 * expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["numbers", "tensors"])
@pytest.mark.parametrize("half", [False, True])
def test_the_rows_of_a_gradient_are_cut_to_its_radius(half, kind):
    """Radius 10: of rows of length 5 and 20 the second is halved."""
    mean, slope = WeightedMean(), torch.tensor([[3.0, 4.0], [16.0, 12.0]])
    summed = mean.weigh(rows(slope.clone(), 0.5, radius=10), 2, kind(8.0), half)
    mean.divide([summed])
    assert_same(summed, torch.tensor([[0.75, 1.0], [2.0, 1.5]]), rtol=1e-6)


def test_a_single_gradient_is_multiplied_in_place_by_its_factor_alone():
    mean, gradient = WeightedMean(), torch.rand(3, 4)
    before = gradient.clone()
    assert mean.weigh(rows(gradient), 4, 0.3, False) is gradient
    assert_same(gradient, 0.25 * before)
    mean.divide([gradient])
    assert_same(gradient, 0.25 * before)


def test_the_mean_over_a_float32_and_a_float16_forward():
    mean, summed = WeightedMean(), torch.zeros(2, 1)
    summed += mean.weigh(rows(torch.full((2, 1), 1e-3)), 1, 1.0, half=False)
    summed += mean.weigh(rows(torch.full((2, 1), 3e-3)), 1, 1.0, half=True)
    mean.divide([summed])
    assert_same(summed, torch.full((2, 1), 2e-3), rtol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_a_gradient_without_rows_weighs_nothing(half):
    mean = WeightedMean()
    mean.weigh(rows(torch.empty(0, 1)), 1, 8.0, half)
    gradient = mean.weigh(rows(torch.full((2, 1), 3.0)), 1, 2.0, half)
    mean.divide([gradient])
    assert_same(gradient, torch.full((2, 1), 3.0))
    assert mean.count == 2


@pytest.mark.parametrize("half", [False, True])
def test_no_device_is_looked_at(half):
    with unreadable_device():
        mean = WeightedMean()
        for _ in range(2):
            gradient = mean.weigh(rows(torch.ones(2, 3)), 1, torch.ones(()), half)
        mean.divide([gradient])


@pytest.mark.parametrize("half", [False, True])
def test_factors_on_the_models_device_reach_a_companion_elsewhere(half):
    with FakeTensorMode():
        mean = WeightedMean()
        for _ in range(2):
            gradient = mean.weigh(rows(torch.ones(2, 3)), 1, torch.ones((), device="cuda"), half)
        mean.divide([gradient])
    assert gradient.device == torch.device("cpu")


# ---- in the companion's step -----------------------------------------------------------------------------------------


def told(model: nn.Module, kind=float, **options) -> DCLOptimizer:
    """An optimizer that is told each loss's factor."""
    optimizer = wrap(model, loss_scale=lambda: kind(optimizer.factor), **options)
    return optimizer


def step(optimizer: DCLOptimizer, factors, data) -> None:
    """One step of several micro-batches, each loss with its factor."""
    optimizer.zero_grad()
    for factor, (x, y) in zip(factors, data, strict=True):
        optimizer.factor = factor
        (factor * F.cross_entropy(optimizer.model(x), y)).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [float, partial(torch.tensor, dtype=torch.float64)], ids=["numbers", "tensors"])
@pytest.mark.parametrize("factors", [(1.0, -1.0), (0.0, 1.0), (1.0, 0.0), (-2.0, 1.0)])
def test_companion_equals_the_loop_by_hand(factors, kind):
    model = mlp()
    optimizer = told(model, kind, weight=0.0, alpha=0.4)
    companion = copy.deepcopy(model)
    theirs, total = sgd(companion), sum(map(abs, factors))
    data = list(batches(8))
    for pair in zip(data[::2], data[1::2], strict=True):
        theirs.zero_grad()
        for factor, (x, _) in zip(factors, pair, strict=True):
            z, c = model(x).detach(), companion(x)
            (F.mse_loss(c, 0.4 * c.detach() + 0.6 * z) * (abs(factor) / total)).backward()
        theirs.step()
        step(optimizer, factors, pair)
        assert_same(optimizer.companion, companion, rtol=1e-10, atol=1e-12)


def test_a_batch_that_counts_for_nothing_teaches_nothing():
    """The companion's optimizer steps as the model's does, with a gradient of zero: momentum goes on."""
    optimizer = told(mlp(), alpha=0.4)
    theirs = []
    optimizer.companion_optimizer.register_step_pre_hook(
        lambda own, *_: theirs.append([p.grad.clone() for group in own.param_groups for p in group["params"]])
    )
    for factor, batch in zip((1.0, 1.0, 0.0), batches(3), strict=True):
        step(optimizer, [factor], [batch])
    assert any(gradient.any() for gradient in theirs[1])
    assert len(theirs[2]) == len(theirs[1])
    assert not any(gradient.any() for gradient in theirs[2])


# ---- in 16 bits the companion learns as in float32, whatever the loss was multiplied by ------------------------------


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_a_float16_gradient_has_the_largest_sum_over_its_rows_between_8_and_16(size):
    generator = torch.Generator().manual_seed(0)
    given = size * torch.randn(50, 3, generator=generator).abs()
    mean = WeightedMean()
    gradient = mean.weigh(rows(given.clone(), 0.5), 1, 1.0, half=True)
    assert 8 <= gradient.sum(0).max() < 16
    mean.divide([gradient])
    assert_same(gradient, 0.5 * given)  # powers of two cost no bit


@pytest.mark.parametrize(("value", "expected"), [(math.inf, True), (1.0, False)])
def test_an_overflow_is_told(value, expected):
    mean = WeightedMean()
    mean.weigh(rows(torch.ones(2, 3)), 1, 1.0, half=True)
    assert mean.has_overflowed([torch.ones(2), torch.tensor([1.0, value])]) is expected


def test_without_float16_gradients_are_not_looked_at_for_an_overflow():
    with unreadable_device():
        assert not WeightedMean().has_overflowed([torch.ones(2)])


def flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in network.parameters()])


def companions_way(
    rows: int, classes: int, gap: float, autocast: torch.dtype | None = None, scale: float = 1.0
) -> Tensor:
    """How far a companion that starts apart from the model by a gap moves in one step."""
    torch.manual_seed(0)
    model, companion = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes)) for _ in range(2))
    companion.load_state_dict(model.state_dict())
    for parameter in companion.parameters():
        parameter.data += gap * parameter.std() * torch.randn_like(parameter)
    before = flat(companion)
    optimizer = DCLOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, companion=companion, loss_scale=scale, weight=0.0
    )
    x, y = torch.randn(rows, 32), torch.arange(rows) % classes
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = F.cross_entropy(model(x).float(), y) / 4096  # so small that its own gradient fits in float16
    (scale * loss).backward()
    optimizer.step()
    return flat(companion) - before


# The scale that a GradScaler starts with, and one that it may climb to. Many classes: each gradient is far below
# float16's smallest number; few rows and classes at a high scale: far above its largest, if it were multiplied as the
# loss is.
@pytest.mark.parametrize(
    ("rows", "classes", "gap", "scale"),
    [(256, 1000, 0.01, 2.0**16), (1024, 1000, 0.1, 2.0**24)],
)
def test_under_float16_autocast_the_companions_step_is_float32s(rows, classes, gap, scale):
    single = companions_way(rows, classes, gap)
    half = companions_way(rows, classes, gap, torch.float16, scale)
    assert (half - single).norm() < 0.05 * single.norm()


def test_under_bfloat16_autocast_the_companions_step_is_float32s():
    single, half = (companions_way(1024, 100, 0.3, dtype) for dtype in (None, torch.bfloat16))
    assert (half - single).norm() < 0.05 * single.norm()


@pytest.mark.parametrize(
    ("weights", "rows", "gap"),
    cells(
        [
            (*case, gap)
            for case in ((torch.float32, 1024), (torch.float32, 2**22), (torch.bfloat16, 1024))
            for gap in (0.125, 8.0)
        ],
        *((torch.float32, 1024, 0.125), (torch.float32, 2**22, 8.0), (torch.bfloat16, 1024, 8.0)),
    ),
)
def test_sums_over_many_rows_that_pull_the_same_way_stay_numbers(weights, rows, gap):
    """Under float16 autocast, and with weights in bfloat16 without."""

    def moved(dtype: torch.dtype, in_float16: bool) -> Tensor:
        torch.manual_seed(0)
        model, companion = (nn.Linear(4, 3).to(dtype) for _ in range(2))
        companion.load_state_dict(model.state_dict())
        companion.bias.data += gap
        before = flat(companion)
        optimizer = DCLOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, companion=companion, loss_scale=1.0, weight=0.0
        )
        x = torch.linspace(0.5, 1.0, 4 * rows).reshape(rows, 4).to(dtype)
        with torch.autocast("cpu", torch.float16, enabled=in_float16):
            loss = 0.0 * model(x).float().sum()
        loss.backward()
        optimizer.step()
        return flat(companion) - before

    single = moved(torch.float32, in_float16=False)
    assert single.abs().min() > 0.01
    half = moved(weights, in_float16=weights == torch.float32)
    torch.testing.assert_close(half, single, rtol=0.03, atol=0.1 * float(single.abs().min()))


def test_where_the_companions_gradient_overflows_float16_its_step_is_left_out():
    """Were it taken, the companion would be nan for good, its penalty with it, and the scaler would skip every step."""
    model, companion = nn.Linear(1, 2), nn.Linear(1, 2)
    for network, weight in ((model, 0.0), (companion, 1e-4)):
        nn.init.constant_(network.weight, weight)
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, companion=companion, weight=0.0)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=2.0), flat(companion)
    x, y = torch.full((16, 1), 3e4), torch.zeros(16, dtype=torch.long)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    scaler.step(optimizer)
    assert torch.equal(flat(companion), before)
