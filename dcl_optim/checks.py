"""Checks of arguments: each raises TypeError or ValueError with the argument's name and value."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from torch import Tensor


def is_number(value: Any) -> bool:
    """Whether a value is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_number(name: str, value: Any) -> None:
    """Demand a real number.

    Examples:
        >>> check_number("steps", "3")
        Traceback (most recent call last):
        ...
        TypeError: steps='3' must be a number, got str
    """
    if not is_number(value):
        raise TypeError(f"{name}={value!r} must be a number, got {type(value).__name__}")


def check_positive(name: str, value: Any, most: float = math.inf) -> None:
    """Demand a finite number above 0, and of at most ``most``.

    Examples:
        >>> check_positive("companion_fraction", 2, most=1.0)
        Traceback (most recent call last):
        ...
        ValueError: companion_fraction=2 must be in (0, 1]
    """
    check_number(name, value)
    if not 0 < value <= most or value == math.inf:
        allowed = f"in (0, {most:g}]" if most < math.inf else "a positive finite number"
        raise ValueError(f"{name}={value!r} must be {allowed}")


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """Demand an integer, of Python or another library; a ValueError says that it is too small.

    Examples:
        >>> check_integer("num_classes", 0, least=1)
        Traceback (most recent call last):
        ...
        ValueError: num_classes=0 must be at least 1
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an integer, got {type(value).__name__}")
    if least is not None and found < least:
        raise ValueError(f"{name}={value!r} must be at least {least}")
    return found


def check_flag(name: str, value: Any) -> None:
    """Demand True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")


def check_labels(targets: Any) -> None:
    """Demand a tensor."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor of labels, got {type(targets).__name__}")


def check_options(logits: Any, strict: Any) -> None:
    """Demand what the arguments of these names have to be."""
    if logits is not None and not callable(logits):
        raise TypeError(f"logits={logits!r} must be a function of the model's output, or None")
    check_flag("strict", strict)
