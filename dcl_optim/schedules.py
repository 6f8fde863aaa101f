r"""Values that change over training: :math:`\alpha_t` and :math:`\lambda_t` as callables of the step.

The step t counts optimizer steps from 1. Any callable ``t -> float`` is a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dcl_optim._validation import check_number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Checked:
    """A number or a callable of the step, as a callable that can only give numbers in [0, upper]."""

    given: float | Schedule
    name: str
    upper: float = math.inf

    def __post_init__(self) -> None:
        if not callable(self.given):
            check_number(self.name, self.given)
            self.check(self.given)

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
