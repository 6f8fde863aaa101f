"""Generalized cross-entropy: between cross-entropy and the absolute error, for wrong labels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def generalized_cross_entropy(z: Tensor, y: Tensor, q: float) -> Tensor:
    r"""GCE (Zhang and Sabuncu, NeurIPS 2018, Equation 6), without their truncation.

    .. math:: \ell = \frac1B \sum_i \frac{1 - p_{i y_i}^q}{q}

    p is the softmax of the logits z. The limit q = 0 is cross-entropy, and q = 1 the absolute error. Each sample's
    gradient is that of cross-entropy times :math:`p_{i y_i}^q`, so it is small for labels that the model finds
    unlikely, and at the start for all.

    Args:
        z: logits, (B, K).
        y: class indices, (B,).
        q: in (0, 1]. Theirs is 0.7.
    """
    log_p = F.log_softmax(z, dim=1).gather(1, y[:, None])
    return ((1 - (q * log_p).exp()) / q).mean()
