"""A companion in float16: what its gradient is divided by, so that it neither overflows nor goes under."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from dcl_optim.shares import _head_room


@pytest.mark.parametrize("peak", [6e-8, 1e-4, 0.75, 1.0, 3.0, 65504.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_peak_becomes_a_sixteenth_or_at_most_half_of_that(dtype, peak):
    gradient = torch.tensor([[0.0, -peak], [peak / 2, 0.0]], dtype=torch.float32)
    room = _head_room(gradient.to(dtype).float())
    assert room.log2().frac() == 0
    assert 1 / 32 <= peak / room < 1 / 16 + 1e-4


def companions_way(dtype: torch.dtype, rows: int, gap: float) -> torch.Tensor:
    """How far a companion whose logits lie apart from the model's by about a gap moves in one step."""
    torch.manual_seed(0)
    model, companion = (nn.Linear(4, 3).to(dtype) for _ in range(2))
    companion.load_state_dict(model.state_dict())
    companion.bias.data += gap
    before = torch.cat([p.detach().flatten().clone() for p in companion.parameters()])
    optimizer = DCLOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, companion=companion, loss_scale=1.0, weight=0.0
    )
    (0.0 * model(torch.linspace(0.5, 1.0, 4 * rows).reshape(rows, 4).to(dtype))).sum().backward()
    optimizer.step()
    return (torch.cat([p.detach().flatten() for p in companion.parameters()]) - before).float()


@pytest.mark.parametrize("gap", [0.125, 8.0])
def test_sums_over_many_rows_stay_within_float16(gap):
    """All rows pull the same way: their sum is as many times the peak, which has to leave room for it."""
    half, single = (companions_way(dtype, 1024, gap) for dtype in (torch.float16, torch.float32))
    assert single.abs().min() > 0.01
    torch.testing.assert_close(half, single, rtol=0.03, atol=1e-3)
