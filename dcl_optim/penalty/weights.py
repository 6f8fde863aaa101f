r"""The weight :math:`\lambda` and :math:`\alpha`: a number, a callable of the step, or a weight that follows the fit.

The step counts optimizer steps from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dcl_optim.forecaster import Forecaster
from dcl_optim.penalty.pull import Scale
from dcl_optim.pytorch.arguments import check_number, check_positive

Schedule = Callable[[int], float]


class Checked:
    """A number or a callable of the step, as a callable that can only give numbers in [0, upper].

    Attributes:
        constant: the number; None for a schedule.
    """

    def __init__(self, given: float | Schedule, name: str, upper: float = math.inf) -> None:
        self.given = given
        self._name = name
        self._upper = upper
        self.constant = None if callable(given) else check_number(name, given, upper)

    def __call__(self, step: int) -> float:
        if not callable(self.given):
            return float(self.given)
        return check_number(self._name, self.given(step), self._upper, at=f" at step {step}")


@dataclass(frozen=True)
class AutoWeight:
    r"""The penalty grows from 0.1 to 1, with fewer than 100 classes to K/100, as the training accuracy a grows.

    .. math:: \lambda = \max\big(\lambda_0,\ \min(1, K/C)\,a^k\big)

    A large weight helps once the model fits its training data, and costs accuracy before. With fewer classes the same
    weight has a larger gradient for each logit.

    The accuracy a is a running mean over the labeled rows of the training batches: what a step adds counts 0.98 times
    as much in the next one. It is 0 before the first step, and stays on the device. A soft label counts as its largest
    share.

    Args:
        floor: :math:`\lambda_0`, the least weight, at least 0. Default 0.1.
        power: k > 0. Default 6.
        classes: C > 0, the number of classes from which on the weight grows to 1. Default 100.

    Examples:
        >>> import torch
        >>> AutoWeight().at(torch.tensor([0.0, 0.5, 0.8, 0.9, 1.0]), num_classes=100)
        tensor([0.1000, 0.1000, 0.2621, 0.5314, 1.0000])
        >>> AutoWeight().at(torch.tensor(1.0), num_classes=40)
        tensor(0.4000)

    Source: ours; the paper keeps :math:`\lambda` fixed.
    """

    floor: float = 0.1
    power: float = 6.0
    classes: float = 100.0

    def __post_init__(self) -> None:
        check_number("floor", self.floor)
        check_positive("power", self.power)
        check_positive("classes", self.classes)

    def at(self, accuracy: Tensor, num_classes: int) -> Tensor:
        """The weight at a training accuracy in [0, 1], which does not synchronize."""
        ceiling = min(1.0, num_classes / self.classes)
        return (accuracy**self.power * ceiling).clamp(min=self.floor)

    @property
    def constant_up_to(self) -> float:
        """The number of classes up to which the weight stays at the floor; with ten it does."""
        return self.floor * self.classes


Weight = float | Schedule | AutoWeight | str


class FollowingFit:
    """An :class:`AutoWeight` at the accuracy that a forecaster measures for it, as a callable of the step."""

    constant = None

    def __init__(self, rule: AutoWeight, forecaster: Forecaster) -> None:
        self.given = rule
        self._forecaster = forecaster
        self._constant_up_to = rule.constant_up_to
        forecaster.measure_accuracy(self._constant_up_to)

    def __call__(self, step: int) -> Scale:
        num_classes = self._forecaster.num_classes
        if num_classes <= self._constant_up_to:
            return self.given.floor
        return self.given.at(self._forecaster.train_accuracy(), num_classes)


def resolve_weight(weight: Weight, forecaster: Forecaster) -> Checked | FollowingFit:
    """Turn the argument that a user writes into a callable of the step; an automatic weight needs labels."""
    given = AutoWeight() if weight == "auto" else weight
    if isinstance(given, str) or (isinstance(given, AutoWeight) and not forecaster.reads_labels):
        allowed = "'auto', a number" if forecaster.reads_labels else "a number"
        raise ValueError(f"weight={weight!r} is not known here; pass {allowed} or a callable of the step")
    return FollowingFit(given, forecaster) if isinstance(given, AutoWeight) else Checked(given, "weight")
