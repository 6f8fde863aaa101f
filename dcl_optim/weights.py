r"""The weight :math:`\lambda` of the penalty: a number, a callable of the step, or the training accuracy's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim._sync import is_sync_step
from dcl_optim._torch import constant
from dcl_optim._validation import check_number, check_positive, is_number
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.schedules import Checked, Schedule


@dataclass(frozen=True)
class AutoWeight:
    r"""The penalty grows from 0.1 to 1, with fewer than 100 classes to K/100, as the training accuracy a grows.

    .. math:: \lambda = \max\big(\lambda_0,\ \min(1, K/C)\,a^k\big)

    A strong penalty helps once the model fits its training data, and costs before. With fewer classes the same weight
    pulls a logit harder.

    The accuracy a of the labelled rows in the training batches is 0 at first. It is computed at the end of steps 3, 4,
    6, 10, 18, 34, 66, 102 and then every 100th, over the steps since the last time (after step 64 over every fourth).
    A soft label counts as its largest share.

    Args:
        floor: :math:`\lambda_0`, the least weight, at least 0. Default 0.1.
        power: k > 0. Default 6.
        classes: C > 0, the number of classes from which on the weight grows to 1. Default 100.

    Examples:
        >>> weight = AutoWeight()
        >>> [round(weight.at(accuracy, num_classes=100), 2) for accuracy in (0.0, 0.5, 0.8, 0.9, 1.0)]
        [0.1, 0.1, 0.26, 0.53, 1.0]
        >>> weight.at(1.0, num_classes=40)
        0.4

    Source: ours; the paper keeps :math:`\lambda` fixed.
    """

    floor: float = 0.1
    power: float = 6.0
    classes: float = 100.0

    def __post_init__(self) -> None:
        check_number("floor", self.floor)
        if not 0 <= self.floor < math.inf:
            raise ValueError(f"floor={self.floor!r} must be finite and >= 0")
        check_positive("power", self.power)
        check_positive("classes", self.classes)

    def at(self, accuracy: float, num_classes: int) -> float:
        """The weight at a training accuracy in [0, 1]."""
        return max(self.floor, min(1.0, num_classes / self.classes) * accuracy**self.power)


ALL_STEPS, EVERY = 64, 4  # the batches of which steps are counted
Weight = float | Schedule | AutoWeight | str


def resolve_weight(weight: Weight, reads_labels: bool) -> Checked | FollowsFit:
    """Turn the argument that a user writes into a callable of the step; an automatic weight needs labels."""
    if isinstance(weight, str):
        if weight != "auto":
            raise ValueError(f"weight={weight!r} is unknown; pass 'auto', a number or a callable of the step")
        weight = AutoWeight()
    if not isinstance(weight, AutoWeight):
        return Checked(weight, "weight")
    if not reads_labels:
        raise ValueError("weight='auto': this optimizer reads no labels; pass a number or a callable of the step")
    return FollowsFit(weight)


class FollowsFit:
    """An :class:`AutoWeight` with the training accuracy that it follows.

    Each batch is counted in two numbers on its device: the rows predicted right, and those without a label.
    """

    constant = None
    accuracy: float
    _counted: list[tuple[Tensor, int]]  # since the accuracy was read
    _pending: list[tuple[Tensor, int]]  # in the step that has not been taken
    _right: int  # of the rows with a label that were read, but not yet taken into the accuracy
    _labelled: int
    _classes: int  # K; 0 before a batch was counted

    def __init__(self, rule: AutoWeight) -> None:
        self.given = rule
        self.load_state({"accuracy": 0.0, "right": 0, "labelled": 0, "classes": 0})

    def __call__(self, step: int) -> float:
        return self.given.at(self.accuracy, self._classes)

    def __str__(self) -> str:
        return "auto" if self.given == AutoWeight() else repr(self.given)

    def count(self, step: int, z: Tensor, labels: Tensor | None) -> None:
        """Count a batch: logits (N, K), and the labels (N,), K for none, or soft labels (N, K), if they are known."""
        if labels is None or not _is_counted(step):
            return
        number, classes = z.shape
        self._classes = classes
        if labels.ndim == 2:
            labels = torch.where(labels.sum(1) > 0.5, labels.argmax(1), classes)
        candidates = torch.stack((z.argmax(1), constant(classes, z.device).expand(number)))
        self._pending.append(((candidates == labels).sum(1), number))

    def end_step(self, step: int, group: DataParallelGroup | None, model: nn.Module) -> None:
        """The batches that are pending were stepped with; read the accuracy if it is time to."""
        if group is not None and group.size > 1 and _is_counted(step):
            # Each time, and not where they are read: a state that one rank saves serves all of them.
            counts = torch.zeros(2, dtype=torch.int64, device=next(iter(model.parameters())).device)
            for found, number in self._pending:
                counts += found
                counts[1] -= number
            group.all_reduce_sum(counts)
            self._pending = [(counts, 0)]
        self._counted += self._pending
        self._pending = []
        if is_sync_step(step - 2):  # the loss and the forecasters are read in the steps before
            self._read()
            if self._labelled:
                self.accuracy, self._right, self._labelled = self._right / self._labelled, 0, 0

    def _read(self) -> None:
        if self._counted:
            right, unlabelled = torch.stack([found for found, _ in self._counted]).sum(0).tolist()
            self._right += right
            self._labelled += sum(number for _, number in self._counted) - unlabelled
        self._counted = []

    def forget(self) -> None:
        """The step of the batches that are pending was skipped."""
        self._pending = []

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know. Synchronizes."""
        self._read()
        counts = {"right": self._right, "labelled": self._labelled, "classes": self._classes}
        return {"accuracy": self.accuracy} | counts

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.accuracy, self._classes = state["accuracy"], state["classes"]
        self._right, self._labelled = state["right"], state["labelled"]
        self._counted, self._pending = [], []


def _is_counted(step: int) -> bool:
    return step <= ALL_STEPS or step % EVERY == 0


def check_weight_state(state: Any) -> None:
    """Raise ValueError unless a state is None, of a weight that follows nothing, or one that can be loaded."""
    if state is None:
        return
    try:
        fits = all(is_number(state[name]) for name in ("accuracy", "right", "labelled", "classes"))
        fits = fits and 0 <= state["accuracy"] <= 1 and 0 <= state["right"] <= state["labelled"]
    except (KeyError, TypeError):
        fits = False
    if not fits:
        raise ValueError(f"the state of the weight does not fit: {state!r}")
