"""The top non-target classes: which they are, their counts, shares, consistency and perplexity."""

from __future__ import annotations

import torch
from torch import Tensor


def top_non_target(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Find each sample's highest-ranked wrong class.

    .. math:: \bar c_x = \operatorname{argmax}_{k \ne y}\, f(\theta, x)_k

    Args:
        logits: floating point, (N, K) with K at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        Integer classes, (N,). Of equal logits the lowest class counts.

    Raises:
        ValueError: the shapes, dtypes or labels are not those.

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
    r"""Count the samples of each class c whose top non-target is k, :math:`n_{ck} = N_c\,p(k|c)`.

    Args:
        logits: floating point, (N, K) with K at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K, K) int64, row c for class c.

    Raises:
        ValueError: the shapes, dtypes or labels are not those.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> top_non_target_counts(logits, torch.tensor([0, 0, 1]))
        tensor([[0, 1, 1],
                [1, 0, 0],
                [0, 0, 0]])

    Source: the counts in Section 3.4's p(k|c).
    """
    best = top_non_target(logits, labels)
    classes = logits.shape[1]
    return torch.bincount(labels.long() * classes + best, minlength=classes * classes).reshape(classes, classes)


def non_target_distribution(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the share of each class's samples whose top non-target is k.

    .. math:: p(k|c) = \frac{1}{N_c}\sum_{x:\,y = c}\mathbb{1}(\bar c_x = k), \qquad p(c|c) = 0

    Args:
        logits: floating point, (N, K) with K at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K, K), row c for class c; each row sums to one, and is zero for an absent class. float32, or float64 if the
        logits are.

    Raises:
        ValueError: the shapes, dtypes or labels are not those.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> non_target_distribution(logits, torch.tensor([0, 0, 1]))
        tensor([[0.0000, 0.5000, 0.5000],
                [1.0000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000]])

    Source: Section 3.4 and Figure 3.
    """
    counts = top_non_target_counts(logits, labels)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return counts.to(wide) / counts.sum(1, keepdim=True).clamp(min=1).to(wide)


def top_non_target_consistency(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the share of each class's samples that have its most frequent top non-target.

    .. math:: \max_{k \ne c} p(k|c)

    Higher is more consistent: 1 if all samples of a class have the same one, at least 1/(K-1). On training data the
    paper finds it correlated with the test accuracy.

    Args:
        logits: floating point, (N, K) with K at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K,), nan for an absent class. float32, or float64 if the logits are.

    Raises:
        ValueError: the shapes, dtypes or labels are not those.

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
    r"""Compute the perplexity of each class's top non-targets.

    .. math:: PP_c = \prod_{k \ne c} p(k|c)^{-p(k|c)}

    Lower is more consistent: it is the effective number of classes among the top non-targets, from 1 to K-1.

    Args:
        logits: floating point, (N, K) with K at least 2.
        labels: integer classes in 0..K-1, (N,).

    Returns:
        (K,), nan for an absent class. float32, or float64 if the logits are.

    Raises:
        ValueError: the shapes, dtypes or labels are not those.

    Examples:
        >>> logits = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0], [5.0, 1.0, 2.0]])
        >>> non_target_perplexity(logits, torch.tensor([0, 0, 1]))
        tensor([2., 1., nan])

    Source: Section 3.4 and Figure 3.
    """
    shares = non_target_distribution(logits, labels)
    return _absent_as_nan(torch.special.entr(shares).sum(1).exp(), shares)


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
