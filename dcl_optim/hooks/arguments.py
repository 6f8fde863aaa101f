"""The labels of a loss that a compiled model takes itself: the argument whose cross-entropy with the logits it is.

Apart from cross_entropy.py, since no gradient tells: a compiled model sends none from its loss through its logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim._tree import tensors_of
from dcl_optim.distances import to_rows

NEAR = 5e-3  # standard errors of the rows' mean: how far from the loss the labels' cross-entropy may be
APART = 10  # times as far as the nearest is the next one, or none is taken


class Place(NamedTuple):
    """Where the labels are: which of the arguments' tensors, the logits' class dimension, and whether they are shifted.

    A causal language model compares the logits of a position with the label of the next one.
    """

    number: int
    class_dim: int
    is_shifted: bool


def find_labels(arguments: Any, z: Tensor, loss: Tensor) -> Place | None:
    """Find the labels among a model's arguments; None where no argument may be they, or several. Synchronises."""
    told = []
    for number in range(len(tensors_of(arguments))):
        for class_dim in sorted({1, z.ndim - 1}):
            for is_shifted in (False, True) if z.ndim == 3 and class_dim == 2 else (False,):
                place = Place(number, class_dim, is_shifted)
                labels = labels_at(place, arguments, z.shape)
                if labels is not None and int((labels < z.shape[class_dim]).sum()) > 1:
                    told.append((_apart(z, labels, class_dim, loss), place, labels))
    told.sort(key=lambda entry: entry[:2])
    if not told or told[0][0] > NEAR:
        return None
    apart, place, labels = told[0]
    rivals = [other for other, _, theirs in told[1:] if not _agree(labels, theirs, z.shape[place.class_dim])]
    return place if all(other > max(APART * apart, NEAR) for other in rivals) else None


def _apart(z: Tensor, labels: Tensor, class_dim: int, loss: Tensor) -> float:
    """How far labels' cross-entropy is from the loss, in standard errors of its mean."""
    rows, classes = to_rows(z.detach(), class_dim), z.shape[class_dim]
    with torch.autocast(z.device.type, enabled=False):
        values = F.cross_entropy(rows.float(), labels, ignore_index=classes, reduction="none")[labels < classes]
    return float((values.mean() - loss.detach()).abs() / (values.std() / len(values) ** 0.5 + 1e-30))


def _agree(labels: Tensor, others: Tensor, classes: int) -> bool:
    """Whether labels are the same wherever both have one, as a text and the same text that was shifted."""
    if len(labels) != len(others):
        return False
    both = (labels < classes) & (others < classes)
    return 2 * int(both.sum()) > len(labels) and bool((labels == others)[both].all())


def labels_at(place: Place, arguments: Any, shape: torch.Size) -> Tensor | None:
    """The label of each row (N,), K for a row that the loss ignores; None where there are none."""
    tensors = tensors_of(arguments)
    classes = shape[place.class_dim]
    if place.number >= len(tensors):
        return None
    labels = tensors[place.number]
    if labels.is_floating_point() or labels.dtype == torch.bool or classes * labels.numel() != shape.numel():
        return None
    if place.is_shifted:
        labels = F.pad(labels.reshape(shape[:2])[:, 1:], (0, 1), value=-1)
    labels = labels.detach().reshape(-1).long()
    return labels.masked_fill((labels < 0) | (labels >= classes), classes)
