"""The losses of knowledge distillation, each a function of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CONTEXTS = (4, 2, 1)  # sides of what hierarchical_context pools a map to


def divergence(z: Tensor, t: Tensor) -> Tensor:
    r""":math:`\mathrm{KL}(\sigma(t) \,\|\, \sigma(z))`, the mean over rows of logits (N, K)."""
    return F.kl_div(F.log_softmax(z, 1), F.log_softmax(t, 1), reduction="batchmean", log_target=True)


def distillation(z: Tensor, t: Tensor, y: Tensor, weight: float = 0.9, temperature: float = 4.0) -> Tensor:
    r"""KD: :math:`(1-w)\,\mathrm{CE}(z, y) + w\,T^2\,\mathrm{KL}(\sigma(t/T) \,\|\, \sigma(z/T))`.

    Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015, with the weight and the
    temperature that are usual for CIFAR-100.

    Args:
        z: the student's logits, (N, K).
        t: the teacher's.
        y: labels, (N,).
        weight: w.
        temperature: T.
    """
    soft = temperature**2 * divergence(z / temperature, t / temperature)
    return (1 - weight) * F.cross_entropy(z, y) + weight * soft


def decoupled(
    z: Tensor, t: Tensor, y: Tensor, alpha: float = 1.0, beta: float = 8.0, temperature: float = 4.0
) -> Tensor:
    r"""DKD: :math:`T^2 (\alpha\,\mathrm{TCKD} + \beta\,\mathrm{NCKD})`, to be added to the cross-entropy.

    TCKD is the divergence of the probabilities of the true class and of all others together, NCKD that of the others
    among each other. KD's divergence is TCKD plus NCKD times the teacher's probability of the others.

    Source: Zhao et al., Decoupled Knowledge Distillation, CVPR 2022, Equation 7; defaults: its ResNet32x4 to ResNet8x4.

    Args:
        z: the student's logits, (N, K).
        t: the teacher's.
        y: labels, (N,).
        alpha: weight of TCKD.
        beta: weight of NCKD.
        temperature: T.
    """
    (ours, our_others), (theirs, their_others) = (_decouple(logits / temperature, y) for logits in (z, t))
    return temperature**2 * (alpha * divergence(ours, theirs) + beta * divergence(our_others, their_others))


def _decouple(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the true class against the others, (N, 2), and those of the others, (N, K-1)."""
    true = F.one_hot(y, z.shape[1]).bool()
    others = z[~true].view(len(z), -1)
    return torch.stack([z[true], others.logsumexp(1)], 1), others


def hierarchical_context(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    r"""ReviewKD's HCL: for each pair of maps the weighted mean of the mean squared errors at several sizes; their sum.

    The maps count 1; pooled to 4x4, 2x2 and 1x1, as far as that is smaller, they count 1/2, 1/4 and 1/8.

    Source: Chen et al., Distilling Knowledge via Knowledge Review, CVPR 2021, Figure 3(b), with its code's weights.

    Args:
        ours: the student's maps, (B, C, H, W).
        theirs: the teacher's, of the same shapes.
    """
    return torch.stack([_context(own, other) for own, other in zip(ours, theirs, strict=True)]).sum()


def _context(ours: Tensor, theirs: Tensor) -> Tensor:
    loss, total, weight = F.mse_loss(ours, theirs), 1.0, 1.0
    for side in (side for side in CONTEXTS if side < ours.shape[2]):
        weight /= 2
        error = F.mse_loss(F.adaptive_avg_pool2d(ours, side), F.adaptive_avg_pool2d(theirs, side))
        loss, total = loss + weight * error, total + weight
    return loss / total
