"""What a script passes as logits and labels, checked where values may be read. Not in prototypes.py, which learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim.forecaster import Labels
from dcl_optim.penalty.layout import to_rows, wide
from dcl_optim.pytorch.internals import constant

SHARE_TOLERANCE = 0.02  # of a share and of a row's sum; bfloat16 leaves up to 0.004 of a smoothed label's sum

KINDS = (
    "pass class indices in an integer dtype, (N,) or (N, d1, ...), or soft or one-hot labels in floating point, "
    "labels.float(), in the shape of the logits, (N, K) or (N, K, d1, ...)"
)


def classes_of(labels: Tensor) -> Tensor:
    """The class of each row (N,), K for none; of soft labels (N, K) that of the largest share."""
    if labels.ndim == 1:
        return labels
    return torch.where(labels.sum(1) > 0.5, labels.argmax(1), labels.shape[1])


def labels_of(labels: Any, logits: Tensor, may_read: bool, ignore_index: int) -> Labels:
    """Check labels that the term got, and lay them out as rows: class indices, or soft labels.

    Values are checked where they may be read.
    """
    shape = tuple(logits.shape)
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}; pass torch.as_tensor(labels)")
    if logits.ndim < 2 or logits.shape[1] == 1:
        raise ValueError(
            f"logits of shape {shape} have no classes; pass (N, K) or (N, K, d1, ...) with K of at least 2, or use "
            "DCLOptimizer (no gain was measured)"
        )
    if labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"labels has {labels.dtype}; of two classes pass labels.long(), else {KINDS}")
    is_soft = labels.is_floating_point()
    if labels.shape != (shape if is_soft else (*shape[:1], *shape[2:])):
        raise ValueError(
            f"labels of dtype {labels.dtype} and shape {tuple(labels.shape)} do not fit logits of shape {shape}; "
            f"{KINDS}. For (batch, time, classes) pass logits.flatten(0, 1), labels.flatten()"
        )
    # The script may write to its own labels before the step, so both are copied.
    if is_soft:
        shares = wide(to_rows(labels.detach())).clone()
        if may_read and len(shares):
            _check_shares(shares)
        return Labels(shares, len(shares))
    classes = labels.detach().flatten().long()
    if may_read and len(classes) and _are_classes(classes, shape[1], ignore_index):
        return Labels(classes.clone(), len(classes))
    has_label = classes != ignore_index
    classes = classes.where(has_label, constant(shape[1], classes.device))
    return Labels(classes, has_label.sum(dtype=torch.float32))


def _are_classes(classes: Tensor, num_classes: int, ignore_index: int) -> bool:
    """Whether all rows have a label; raise ValueError for one that is neither a class nor to be ignored."""
    least, most = torch.stack(torch.aminmax(classes)).tolist()
    if least >= 0 and most < num_classes:
        return not 0 <= ignore_index < num_classes
    is_out = (classes < 0) | (classes >= num_classes)
    wrong = classes[is_out & (classes != ignore_index)]
    if len(wrong):
        raise ValueError(
            f"labels has {int(wrong[0])}; labels must lie in 0..{num_classes - 1} or equal ignore_index={ignore_index}"
            ": is there a logit for each class? Hidden states and the K - 1 logits of ordinal losses are none"
        )
    return False


def _check_shares(shares: Tensor) -> None:
    sums = shares.sum(1)
    least, lowest, highest = torch.stack((shares.min(), sums.min(), sums.max())).tolist()
    if not min(least, lowest - 1.0, 1.0 - highest) >= -SHARE_TOLERANCE:
        raise ValueError(
            f"labels has soft labels that are not distributions over {shares.shape[1]} classes (the least share is "
            f"{least:g}, rows sum to {lowest:g} up to {highest:g}).\n"
            "  Fix: with sigmoid outputs (binary, multi-label) and regression use DCLOptimizer (no gain was "
            "measured)"
        )
