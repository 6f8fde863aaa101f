"""How far logits move between two models."""

from __future__ import annotations

import torch
from torch import Tensor


def logit_drift(logits_before: Tensor, logits_after: Tensor) -> Tensor:
    r"""Compute the mean distance that the samples' logits moved.

    .. math:: d = \frac1N\sum_i\lVert z'_i - z_i\rVert_2

    Args:
        logits_before: logits of an earlier model, (N, K), N and K at least 1.
        logits_after: logits of a later model on the same samples, (N, K).

    Returns:
        A scalar; 0 for equal logits. float32, or float64 if the logits are.

    Raises:
        ValueError: the shapes are not those.

    Examples:
        >>> logit_drift(torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor(3.)

    Source: Figure 5, whose d is an average distance in the space of logits; the paper gives no formula.
    """
    if logits_before.ndim != 2 or 0 in logits_before.shape:
        raise ValueError(f"logits_before has shape {tuple(logits_before.shape)}; it must be (N, K), neither of them 0")
    if logits_after.shape != logits_before.shape:
        raise ValueError(
            f"logits_after has shape {tuple(logits_after.shape)}; it must be that of logits_before, "
            f"{tuple(logits_before.shape)}"
        )
    wide = torch.promote_types(logits_before.dtype, torch.float32)
    return torch.linalg.vector_norm(logits_after.detach().to(wide) - logits_before.detach().to(wide), dim=1).mean()
