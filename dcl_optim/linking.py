"""What a call of the criterion is about: which forwards, and how many terms its loss sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dcl_optim.forecaster import Forward
from dcl_optim.inputs import tensors_of

# Targets of the input's shape, and one term a row: distributions, sets of labels, another embedding.
ONE_TERM_A_ROW = (
    nn.CrossEntropyLoss,
    nn.KLDivLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.TripletMarginLoss,
)


def concerned(forwards: list[Forward], arguments: Any) -> tuple[list[Forward], bool]:
    """Find the forwards that a call of the criterion is about.

    Args:
        forwards: those that wait for a backward, and those that may get another one.
        arguments: what the criterion was called with, tensors in nested tuples, lists and dicts.

    Returns:
        The forwards whose output, or a view of it, the criterion was given, and True; or else all that wait and have
        had no such call, and False.
    """
    tensors = [tensor for tensor in tensors_of(arguments) if tensor.requires_grad]
    exact = [forward for forward in forwards if any(map(forward.produced, tensors))]
    return exact or [forward for forward in forwards if not (forward.counted or forward.surely_linked)], bool(exact)


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
