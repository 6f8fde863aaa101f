"""What each forward counts for in the companion's step: as much as its loss counts for in the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim.forecaster import Scale


class Shares:
    """Makes a mean of the gradients since the last step, weighed by the size of what each loss was multiplied by.

    A negative factor counts as its opposite, since the companion follows the model wherever the loss sends it. A
    factor of 0, or a batch without rows, counts for nothing; the mean of nothing is zero. No device is looked at.

    Attributes:
        count: how many gradients there are so far.
        half: whether they are kept in float16, as logits are under autocast: it has no room for their size as it is.

    Examples:
        >>> shares, summed = Shares(), torch.zeros(1, 1)
        >>> for gradient, factor in ((4.0, 0.5), (7.0, -0.25)):
        ...     summed += shares.weigh(torch.tensor([[gradient]]), factor, half=False)
        >>> shares.divide([summed])
        >>> summed
        tensor([[5.]])
    """

    def __init__(self) -> None:
        self.count, self.half = 0, False
        self._unit: Any = 0.0  # factors are divided by this one, the first that is not 0: one alone then weighs 1
        self._head: Any = 1.0
        self._total: Any = 0.0  # sum of the weights so far

    def weigh(self, gradient: Tensor, factor: Scale, half: bool) -> Tensor:
        """Multiply a gradient, rows (N, K), by its weight, in place; ``half`` if it is going to be float16."""
        if not len(gradient):
            factor = 0.0
        elif half and not self.half:
            self.half, self._head = True, _head_room(gradient)
        size: Any = abs(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)
        self._unit = _or(self._unit, size)
        weight = size / _or(self._unit, 1.0)
        if self.half:
            weight = weight / self._head
        self.count, self._total = self.count + 1, self._total + weight
        return gradient if isinstance(weight, float) and weight == 1.0 else gradient.mul_(weight)

    @property
    def several(self) -> bool:
        """Whether there is anything to divide."""
        return self.count > 1 or self.half

    def divide(self, gradients: list[Tensor]) -> None:
        """Divide sums of weighed gradients by the sum of the weights, in place."""
        if gradients:
            torch._foreach_div_(gradients, _or(self._total, 1.0))


def _or(value: Any, other: Any) -> Any:
    """A value, or another one where it is 0."""
    return torch.where(value != 0, value, other) if isinstance(value, Tensor) else value or other


def _head_room(gradient: Tensor) -> Tensor:
    """The power of two that a gradient is divided by to survive in float16: its largest sum over rows becomes 8 to 16.

    The sum and not the peak, since biases add up all rows, of which dense predictions have millions. The loss's scale
    would not do: a gradient scaler raises it until the model's gradients overflow, and the companion's may be larger.
    """
    exponent = torch.frexp(gradient.abs().sum(0).amax()).exponent
    return torch.ldexp(torch.ones_like(gradient[0, 0]), exponent - 4)
