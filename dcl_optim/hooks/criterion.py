"""A call of the criterion: which forwards it is about, and how many terms its loss sums.

Apart from regularizer.py, which is Algorithm 1: these are questions about a loss module's arguments.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from dcl_optim._tree import tensors_of
from dcl_optim.forecaster import ForwardRecord

_requires_grad = attrgetter("requires_grad")

# Targets of the input's shape, and one term a row: distributions, sets of labels, another embedding.
ONE_TERM_A_ROW = (
    nn.CrossEntropyLoss,
    nn.KLDivLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.TripletMarginLoss,
)


def linked_forwards(records: list[ForwardRecord], arguments: Any) -> tuple[list[ForwardRecord], bool]:
    """Find the forwards that a call of the criterion is about.

    Args:
        records: the forwards whose graph is alive.
        arguments: what the criterion was called with, tensors in nested tuples, lists and dicts.

    Returns:
        The forwards, and whether the criterion was given their very outputs, or views of them. Where it was not (their
        outputs were put together first, or processed), these are all whose backward has not come, but for those of an
        exact call.
    """
    tensors = list(filter(_requires_grad, tensors_of(arguments)))
    exact, waiting = [], []
    for record in records:
        if any(map(record.produced, tensors)):
            exact.append(record)
        elif not record.counted and not record.is_criterion_input:
            waiting.append(record)
    return exact or waiting, bool(exact)


def terms_of_sum(criterion: nn.Module | None, logits: Any, targets: Any) -> float | Tensor:
    """Say how many terms a criterion's mean would divide by, where it sums instead; 1 where it does not.

    The rows that are not ignored, and every element for elementwise losses: those with floating-point targets of the
    input's shape, but for ``ONE_TERM_A_ROW``. Class weights are left out.

    Args:
        criterion: the loss module, with or without an attribute ``reduction``.
        logits: what it was called with.
        targets: the labels it was called with.

    Returns:
        The number, at least 1; a tensor where counting would synchronise a device.

    Examples:
        >>> import torch
        >>> summing = nn.CrossEntropyLoss(reduction="sum")
        >>> terms_of_sum(summing, torch.zeros(3, 2), torch.tensor([0, -100, 1]))
        2
        >>> terms_of_sum(nn.MSELoss(reduction="sum"), torch.zeros(3, 2), torch.zeros(3, 2))
        6
        >>> terms_of_sum(nn.MSELoss(), torch.zeros(3, 2), torch.zeros(3, 2))
        1
    """
    if getattr(criterion, "reduction", None) != "sum" or not isinstance(logits, Tensor):
        return 1
    if not isinstance(targets, Tensor):
        return max(len(logits), 1) if logits.ndim else 1
    if targets.shape == logits.shape and isinstance(criterion, ONE_TERM_A_ROW):
        return max(targets[:, 0].numel(), 1) if targets.ndim > 1 else 1
    ignored = getattr(criterion, "ignore_index", None)
    if targets.is_floating_point() or ignored is None:
        return max(targets.numel(), 1)
    count = (targets != ignored).sum().clamp(min=1)
    return count if count.device.type != "cpu" else count.item()
