"""What must be true of a copy's first forecast: it is what the model gave.

Apart from companion.py, which is Algorithm 1: this is how far rounding may go, and what else may be the reason.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dcl_optim._torch import warn
from dcl_optim.distributed import is_sharded


def require_equal(logits: Tensor, forecast: Tensor, companion: nn.Module) -> None:
    """Warn if a copy's first forecast differs from the model's logits by more than rounding. Synchronises."""
    if logits.device.type == "meta" or is_sharded(logits):
        return
    both_nan = logits.isnan() & forecast.isnan()
    wide = torch.promote_types(logits.dtype, torch.float32)
    difference = (logits - forecast).masked_fill((logits == forecast) | both_nan, 0).to(wide).norm()
    size = logits.masked_fill(~logits.isfinite(), 0).to(wide).norm()
    apart, allowed = torch.stack([difference, size]).tolist()
    if apart <= allowed * _tolerance(logits, companion):
        return
    warn(
        "the first forecast of dcl_optim's companion, a copy of the model, is not what the model gave for the same "
        f"input: it is {apart / allowed if allowed else math.inf:.1%} of the logits' size away. Whatever makes the "
        "difference is in the penalty. Usual reasons: inputs that the forward changes inside an object that is no "
        "tuple, list, dict or dataclass (clone them first); hooks of the model that are not copied (register them on "
        "optimizer.companion too); state outside of modules, which both networks change; random draws from outside of "
        "torch's generators; weights that were loaded or changed since optimizer.companion was asked for (call "
        "optimizer.reset_companion())"
    )


def _tolerance(logits: Tensor, companion: nn.Module) -> float:
    """The square root of the coarsest rounding that takes part; on a GPU kernels may add up in any order, in TF32."""
    device = logits.device.type
    dtypes = {logits.dtype, *(p.dtype for p in companion.parameters() if p.is_floating_point())}
    if device != "cpu" or torch.is_autocast_enabled(device):
        dtypes.add(torch.bfloat16)
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))
