r"""What the paper measures on logits: top non-target classes, their consistency and perplexity, and drift.

The *top non-target* of a sample is the wrong class that the model ranks highest. A model that has found which classes
resemble each other names the same one or two for all samples of a class.

Letters: N samples, K classes, c a sample's class, :math:`N_c` its number of samples, :math:`p(k|c)` the share of them
whose top non-target is k. *Absent* classes are those without a sample; they have no value, and ``Tensor.nanmean``
leaves them out of an average.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_non_target(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Find each sample's highest-ranked wrong class, :math:`\bar c_x = \arg\max_{k \ne y} f(\theta, x)_k`.

    Args:
        logits: floating point, (N, K) with K of at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        Integer classes, (N,). Of equal logits the lowest class counts.

    Raises:
        ValueError: shapes, dtypes or labels other than these.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
        >>> top_non_target(logits, torch.tensor([0, 1]))
        tensor([2, 0])

    Source: Section 3.4 and Figure 2.
    """
    _check(logits, labels)
    # Leaving the label's column out, instead of filling it with -inf, is right for logits that are -inf themselves.
    columns = torch.arange(logits.shape[1] - 1, device=logits.device)
    others = columns + (columns >= labels[:, None])
    best = logits.detach().gather(1, others).argmax(1)
    return best + (best >= labels)


def top_non_target_counts(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the pairs of a sample's class and its top non-target.

    Args:
        logits: floating point, (N, K) with K of at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K, K) integers, row c for class c.

    Raises:
        ValueError: shapes, dtypes or labels other than these.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> top_non_target_counts(logits, torch.tensor([0, 0, 1]))
        tensor([[0, 1, 1],
                [1, 0, 0],
                [0, 0, 0]])
    """
    best, classes = top_non_target(logits, labels), logits.shape[1]
    return torch.bincount(labels.long() * classes + best, minlength=classes * classes).reshape(classes, classes)


def non_target_distribution(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Share of each class's samples that rank k highest among the wrong classes.

    .. math:: p(k|c) = \frac{1}{N_c}\sum_{x:\,y = c}\mathbb{1}(\bar c_x = k), \qquad p(c|c) = 0

    Args:
        logits: floating point, (N, K) with K of at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K, K), row c for class c; rows sum to one, and are zero for an absent class. float32, or float64 as the logits.

    Raises:
        ValueError: shapes, dtypes or labels other than these.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> non_target_distribution(logits, torch.tensor([0, 0, 1]))
        tensor([[0.0000, 0.5000, 0.5000],
                [1.0000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000]])

    Source: Section 3.4 and Figure 3.
    """
    counts = top_non_target_counts(logits, labels).to(torch.promote_types(logits.dtype, torch.float32))
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def top_non_target_consistency(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Share of each class's samples that agree on its most frequent top non-target, :math:`\max_{k \ne c} p(k|c)`.

    Higher is more consistent: 1 where all samples of a class name the same one, 1/(K-1) at the least. On training data
    the paper finds it correlated with the test accuracy.

    Args:
        logits: floating point, (N, K) with K of at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K,), nan for an absent class.

    Raises:
        ValueError: shapes, dtypes or labels other than these.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> consistency = top_non_target_consistency(logits, torch.tensor([0, 0, 1]))
        >>> consistency, consistency.nanmean()
        (tensor([0.5000, 1.0000,    nan]), tensor(0.7500))

    Source: Section 3.4 and Figure 2.
    """
    shares = non_target_distribution(logits, labels)
    return _absent_as_nan(shares.amax(1), shares)


def non_target_perplexity(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Perplexity of each class's top non-targets, :math:`PP_c = \prod_{k \ne c} p(k|c)^{-p(k|c)}`.

    Lower is more consistent: it is the number of classes that the top non-targets are spread over, from 1 to K-1.

    Args:
        logits: floating point, (N, K) with K of at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K,), nan for an absent class.

    Raises:
        ValueError: shapes, dtypes or labels other than these.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> non_target_perplexity(logits, torch.tensor([0, 0, 1]))
        tensor([2., 1., nan])

    Source: Section 3.4 and Figure 3.
    """
    shares = non_target_distribution(logits, labels)
    return _absent_as_nan(torch.special.entr(shares).sum(1).exp(), shares)


def logit_drift(logits_before: Tensor, logits_after: Tensor) -> Tensor:
    r"""Mean distance that the samples' logits moved, :math:`\frac1N\sum_i\lVert z'_i - z_i\rVert_2`.

    Args:
        logits_before: logits of an earlier model, (N, K).
        logits_after: logits of a later model on the same samples, (N, K).

    Returns:
        A scalar; 0 for equal logits.

    Raises:
        ValueError: shapes other than these, or no samples.

    Examples:
        >>> logit_drift(torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor(3.)

    Source: Figure 5, whose d is an average distance in the space of logits; the paper does not spell it out.
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


def _absent_as_nan(values: Tensor, shares: Tensor) -> Tensor:
    return values.masked_fill(shares.sum(1) == 0, float("nan"))


def _check(logits: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless logits and labels fit each other."""
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}; it must be floating point, (N, K) with "
            "at least 2 classes"
        )
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; it must be one class per row, ({len(logits)},)")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels has dtype {labels.dtype}; it must be integer classes")
    classes = logits.shape[1]
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise ValueError(f"labels holds {int(outside[0])}; it must be in 0..{classes - 1} for {classes} logits")
