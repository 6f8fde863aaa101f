"""The mean of the companion's gradients over the forward passes of a step: how much each one counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dcl_optim._torch import constant
from dcl_optim.distances import Rows
from dcl_optim.loss.reader import Scale


class WeightedMean:
    r"""Makes :math:`\sum_i|s_i|\,g_i / \sum_i|s_i|`, where :math:`s_i` is what the loss was multiplied by.

    A factor of 0, or a batch without rows, counts for nothing. Nothing synchronizes.

    Attributes:
        count: how many gradients there are so far.
        half: whether they are in float16: they are divided by a power of two at the logits, and multiplied by it in the
            parameters' dtype.
    """

    def __init__(self) -> None:
        self.count, self.half = 0, False
        self._unit: Any = 1.0  # factors are divided by the first one: alone it then weighs 1
        self._room: Any = 1.0
        self._total: Any = 0.0  # sum of the weights so far

    def weigh(self, rows: Rows, number: int, scale: Scale, half: bool) -> Tensor:
        """The gradient of a mean over a number of rows, (N, K), by its weight, in the memory of their slope; ``half``
        if it becomes float16."""
        gradient, factor, norms = rows.slope, rows.factor / number, None
        size = (scale.to(gradient.device) if isinstance(scale, Tensor) else abs(scale)) if len(gradient) else 0.0
        if rows.radius != math.inf:
            norms, factor = rows.values.clamp(min=rows.radius)[:, None], factor * rows.radius
        if half:
            gradient = gradient.mul_(factor) if norms is None else gradient.mul_(factor / norms)
            factor, norms = 1.0, None
        if self.count == 0:
            if half and len(gradient):
                self._room = _room_for(gradient)
            self._unit, weight = size, _is_not_zero(size)
        else:
            if self.count == 1:
                self._unit = _or(self._unit, 1.0)
            weight = abs(size / self._unit)
        if half:
            weight = weight / self._room
        self.half |= half
        self.count += 1
        self._total = weight if self.count == 1 else self._total + weight
        if norms is None:
            return gradient.mul_(weight * factor)
        if not isinstance(weight, Tensor):
            factor, weight = factor * weight, constant(1, norms.device)
        return gradient.mul_(torch.addcdiv(constant(0, norms.device), weight, norms, value=factor))

    def divide(self, gradients: list[Tensor]) -> None:
        """Divide sums of weighted gradients by the sum of the weights, in place."""
        if gradients and (self.count > 1 or self.half):
            torch._foreach_div_(gradients, _or(self._total, 1.0))

    def has_overflowed(self, gradients: list[Tensor]) -> bool:
        """Whether gradients that were in float16 are not finite; such a step has to be skipped."""
        return self.half and not bool(torch.stack(torch._foreach_norm(gradients, math.inf)).isfinite().all())


def _is_not_zero(value: Any) -> Any:
    return torch.ne(value, 0, out=torch.empty_like(value)) if isinstance(value, Tensor) else float(value != 0)


def _or(value: Any, other: Any) -> Any:
    """A value, or another one if it is 0."""
    return torch.where(value != 0, value, other) if isinstance(value, Tensor) else value or other


def _room_for(gradient: Tensor) -> Tensor:
    """The power of two that a gradient is divided by in float16: its largest sum over rows (a bias) is 8 to 16 then."""
    exponent = torch.frexp(gradient.abs().sum(0).amax()).exponent
    return torch.ldexp(torch.ones_like(gradient[0, 0]), exponent - 4)
