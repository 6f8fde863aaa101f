"""The companion in 16 bits: under autocast it learns as in float32, whatever the loss was multiplied by."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from tests.helpers import cells


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
        loss = F.cross_entropy(model(x).float(), y)
    (scale * loss).backward()
    optimizer.step()
    return flat(companion) - before


# Scales that a GradScaler starts with, and may climb to. Many classes: each gradient is far below float16's smallest
# number; few rows and classes at a high scale: far above its largest, if it were multiplied as the loss is.
@pytest.mark.parametrize("scale", [2.0**16, 2.0**24])
@pytest.mark.parametrize(("rows", "classes", "gap"), [(16, 5, 0.1), (256, 1000, 0.01), (1024, 1000, 0.1)])
def test_under_float16_autocast_the_companions_step_is_float32s(
    rows: int, classes: int, gap: float, scale: float
) -> None:
    single = companions_way(rows, classes, gap)
    half = companions_way(rows, classes, gap, torch.float16, scale)
    assert (half - single).norm() < 0.05 * single.norm()


def test_under_bfloat16_autocast_the_companions_step_is_float32s() -> None:
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
def test_sums_over_many_rows_that_pull_the_same_way_stay_numbers(weights: torch.dtype, rows: int, gap: float) -> None:
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


def test_where_the_companions_gradient_overflows_float16_its_step_is_left_out() -> None:
    """Were it taken, the companion would be NaN for good, its penalty with it, and the scaler would skip every step."""
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
