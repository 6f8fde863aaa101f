"""Reverse cross-entropy, which symmetric cross-entropy adds to cross-entropy, for wrong labels."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

LOG_ZERO = math.log(1e-4)  # what the authors' code has for the logarithm of a label's share of 0


def reverse_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    r"""Reverse cross-entropy (Wang et al., ICCV 2019, Equation 6).

    .. math:: \ell = -\frac1B \sum_i \sum_k p_{ik} \log t_{ik} = -\frac{A}{B} \sum_i (1 - p_{i y_i})

    p is the softmax of the logits z, and t the one-hot label, with A in place of :math:`\log 0`: here -9.2, as in the
    authors' code; the paper's text has -4. Symmetric cross-entropy (SCE) is :math:`\alpha` times cross-entropy plus
    :math:`\beta` times this.

    Args:
        z: logits, (B, K).
        y: class indices, (B,).
    """
    p = F.softmax(z, dim=1).gather(1, y[:, None])
    return -LOG_ZERO * (1 - p).mean()
