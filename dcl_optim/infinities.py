"""Logits of minus infinity, as masked classes and padded vocabularies have them: no part of any difference.

On the CPU they are searched for only where a sum, one quick pass, says that there may be some; a look at another device
would synchronise it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def departure(z: Tensor, c: Tensor) -> Tensor:
    """Say how far z is from c: the difference, and 0 where both are the same infinity.

    Args:
        z: logits.
        c: forecast, same shape.

    Examples:
        >>> departure(torch.tensor([1.0, -torch.inf]), torch.tensor([3.0, -torch.inf]))
        tensor([-2.,  0.])
    """
    if not _may_look(z):
        return (z - c).masked_fill(z == c, 0.0)
    difference = z - c
    return difference.masked_fill_(difference.isnan() & z.isinf(), 0.0) if _suspect(difference) else difference


def between(z: Tensor, c: Tensor, share: float) -> Tensor:
    """The point that lies this share of the way from z to c; the same infinity where both are one.

    Examples:
        >>> between(torch.tensor([8.0, -torch.inf]), torch.tensor([0.0, -torch.inf]), 0.75)
        tensor([2., -inf])
    """
    point = torch.lerp(z, c, share)
    return point if _may_look(z) and not _suspect(point) else torch.where(z == c, c, point)


def possible(logits: Tensor) -> bool:
    """Whether there may be any: always, but for a tensor that can be looked at."""
    return not _may_look(logits) or not math.isfinite(logits.detach().sum().item())


def _may_look(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _suspect(difference: Tensor) -> bool:
    """Whether any entry is no number (or there are infinities of both signs)."""
    return math.isnan(difference.detach().sum().item())
