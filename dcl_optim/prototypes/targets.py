"""From the labels that the script gave to a class, or shares of all classes, for each row of logits.

Apart from prototypes.py, since it is all checks and their messages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim._validation import check_labels
from dcl_optim.forecaster import ForwardRecord

ROUNDING = 0.02  # what a share and a row's sum may be off by; bfloat16 leaves up to 0.004 of smoothed labels' sum


def to_classes(
    targets: Any, record: ForwardRecord, num_classes: int, ignore_index: int, look: bool = True
) -> tuple[Tensor, bool]:
    """Check labels, hard or soft ones, and lay them out as the rows of a forward's logits.

    The range of hard labels is checked on the CPU only, since looking would synchronise a GPU, whose own index kernels
    assert; soft labels on a GPU only where ``look`` says so.

    Returns:
        Classes (N,), K where ignored, or shares (N, K); and whether these are classes none of which is K, as far as
        that is known without synchronising a device.
    """
    check_labels(targets)
    check_width(record, num_classes)
    rows = len(record.logits)
    if targets.dtype.is_floating_point and targets.shape == record.shape:
        shares = record.rows(targets.detach())
        if look or shares.device.type == "cpu":
            _check_distributions(shares)
        return shares, False
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise TypeError(
            f"targets of dtype {targets.dtype} and shape {tuple(targets.shape)} are neither class indices nor soft "
            f"labels of the logits' shape {tuple(record.shape)}"
        )
    if targets.numel() != rows:
        if record.targets is None:  # of the criterion: graph networks take their loss over some of the nodes
            raise ValueError(
                f"the criterion was given {targets.numel()} labels, and the model gave {rows} rows of logits. For a "
                "loss of some of the rows (a mask of nodes) leave criterion= out, so that the labels are read off the "
                "gradient, or call set_targets with a label for each row before the forward, ignore_index (-100) where "
                "a row has no part in the loss; see class_dim= too"
            )
        raise ValueError(f"targets has {targets.numel()} labels for {rows} rows of logits; see class_dim= too")
    flat = targets.ndim == 1 and targets.dtype == torch.int64
    return _checked(targets if flat else targets.detach().reshape(-1).long(), num_classes, ignore_index)


def check_width(record: ForwardRecord, num_classes: int) -> None:
    """Demand as many logits a row as there are classes."""
    logits = record.logits.shape[1]
    if logits != num_classes:
        fix = _fix(record, num_classes)
        raise ValueError(f"num_classes={num_classes} but the model gives {logits} logits; {fix}")


def _fix(record: ForwardRecord, num_classes: int) -> str:
    dims = [dim for dim, size in enumerate(record.shape) if dim and size == num_classes]
    if not dims:
        return "pass that number"
    dim = -1 if dims[-1] == len(record.shape) - 1 else dims[0]
    return f"in its output of shape {tuple(record.shape)} pass class_dim={dim}, along which it gives {num_classes}"


def _check_distributions(shares: Tensor) -> None:
    sums = shares.sum(1, dtype=torch.promote_types(shares.dtype, torch.float32))
    if not bool((shares >= -ROUNDING).all() & ((sums - 1).abs() <= ROUNDING).all()):
        raise ValueError(
            f"targets has soft labels that are no distribution over the {shares.shape[1]} classes (the least share is "
            f"{float(shares.min()):g}, rows sum to {float(sums.min()):g} up to {float(sums.max()):g}). DCPOptimizer is "
            "for softmax classifiers: models with sigmoid outputs (binary, multi-label) and regression take "
            "DCLOptimizer, which needs no labels"
        )


def _checked(labels: Tensor, num_classes: int, ignore: int) -> tuple[Tensor, bool]:
    if labels.device.type == "cpu" and len(labels):
        low, high = labels.aminmax()
        if int(low) >= 0 and int(high) < num_classes and not 0 <= ignore < num_classes:
            return labels, True
        wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignore)
        if wrong.any():
            raise ValueError(
                f"targets has label {int(labels[wrong][0])}; labels must lie in 0..{num_classes - 1} or equal "
                f"ignore_index={ignore}"
            )
    return labels.masked_fill(labels == ignore, num_classes), False
