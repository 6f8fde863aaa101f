r"""Values that change over training: :math:`\alpha_t` and :math:`\lambda_t` as callables of the step.

The step t counts optimizer steps from 1. Any callable ``t -> float`` is a schedule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dcl_optim._validation import check_number, is_number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class RunningAverage:
    r""":math:`\alpha_t = (t-1)/t`: every past model counts equally (Section 3.2).

    The paper prefers a fixed 0.6.

    Examples:
        >>> [RunningAverage()(t) for t in (1, 2, 4)]
        [0.0, 0.5, 0.75]
    """

    def __call__(self, step: int) -> float:
        return (step - 1) / step


@dataclass(frozen=True)
class LinearWarmup:
    r"""Grow linearly to a value and stay: :math:`v\,\min(1, t/T)`. Ours; the paper keeps :math:`\lambda` fixed.

    Args:
        value, steps: v, at least 0, and T, the number of optimizer steps until it is reached, at least 1.

    Examples:
        >>> schedule = LinearWarmup(1.0, steps=4)
        >>> [schedule(t) for t in (1, 2, 4, 100)]
        [0.25, 0.5, 1.0, 1.0]
    """

    value: float
    steps: int

    def __post_init__(self) -> None:
        for name, given, least in (("value", self.value, 0), ("steps", self.steps, 1)):
            check_number(name, given)
            if not least <= given < math.inf:
                raise ValueError(f"{name}={given!r} must be finite and >= {least}")

    def __call__(self, step: int) -> float:
        return self.value * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Checked:
    """A number or a callable of the step, as a callable that can only give numbers in [0, upper]."""

    given: float | Schedule
    name: str
    upper: float = math.inf

    def __post_init__(self) -> None:
        if not callable(self.given):
            if not is_number(self.given):
                kind = type(self.given).__name__
                raise TypeError(f"{self.name}={self.given!r} must be a number or a callable of the step, got {kind}")
            self.check(self.given)
            return
        try:
            inspect.signature(self.given).bind(1)
        except ValueError:  # one written in C has no signature
            pass
        except TypeError as error:
            raise TypeError(f"{self.name}={self.given!r} cannot be called with the step alone: {error}") from error

    @cached_property
    def constant(self) -> float | None:
        """The number that was given; None for a schedule."""
        return None if callable(self.given) else float(self.given)

    def __call__(self, step: int) -> float:
        return self.check(self.given(step), step) if callable(self.given) else float(self.given)

    def check(self, given: float, step: int | None = None) -> float:
        """Return a value as a float; raise if it is not a number or out of range."""
        at = "" if step is None else f" at step {step}"
        if not hasattr(given, "__float__"):
            raise TypeError(f"{self.name}{at} must be a number, got {type(given).__name__}")
        value = float(given)
        if not 0 <= value <= self.upper or value == math.inf:
            allowed = f"in [0, {self.upper:g}]" if self.upper < math.inf else "finite and >= 0"
            raise ValueError(f"{self.name}={value!r}{at} must be {allowed}")
        return value

    def __str__(self) -> str:
        return repr(self.given) if callable(self.given) else f"{float(self.given):g}"
