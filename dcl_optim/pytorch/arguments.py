"""Checks of arguments and of saved states: each raises TypeError or ValueError with the name and the value."""

from __future__ import annotations

import math
import operator
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.pytorch.parameters import has_other_parameters, parameters_of


def check_number(name: str, value: Any, upper: float = math.inf, *, is_positive: bool = False, at: str = "") -> float:
    """Give a finite number from 0 to ``upper``, of Python or another library, as a float; raise for other values."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r}{at} must be a number, got {type(value).__name__}")
    number = float(value)
    if not 0 <= number <= upper or number == math.inf or (is_positive and number == 0):
        interval = f"{'(' if is_positive else '['}0, {upper:g}{']' if upper < math.inf else ')'}"
        raise ValueError(f"{name}={value!r}{at} must be in {interval}")
    return number


def check_positive(name: str, value: Any) -> None:
    """Raise unless a value is a finite number above 0."""
    check_number(name, value, is_positive=True)


def check_integer(name: str, value: Any) -> int:
    """Raise unless a value is an integer, of Python or another library."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be an integer, got {type(value).__name__}")
    return operator.index(value)


def check_arguments(base: Optimizer, model: Any, logits: Any) -> None:
    """Raise unless the base optimizer trains the model by minimizing, and ``logits`` is a function or None."""
    if any(hasattr(parameter, "grad_sample") for parameter in parameters_of(base)):
        raise ValueError(
            "base_optimizer is refused: its parameters have per-sample gradients (grad_sample), as opacus gives them. "
            "Companion and prototypes learn without clipping and noise, so the privacy accounting would not hold"
        )
    if hasattr(base, "step_was_skipped"):
        raise ValueError(
            "base_optimizer was prepared by Accelerate, which leaves out some of its steps.\n"
            "  Fix: wrap before prepare, wrapper = DCPOptimizer(optimizer, model), and prepare the wrapper"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(group.get("maximize") for group in base.param_groups) or getattr(base, "maximize", False):
        raise ValueError("base_optimizer has maximize=True, which maximizes the penalty too; negate the loss instead")
    if has_other_parameters(base, model):
        raise ValueError("model shares no parameters with base_optimizer; pass the model that this optimizer trains")
    if logits is not None and not callable(logits):
        raise TypeError(f"logits={logits!r} must be a function of the model's output, or None")


def check_state(found: Any, expected: dict[str, Any], owner: str) -> None:
    """Raise ValueError unless a saved state has the names, types, shapes and kinds of dtype of an expected one.

    Args:
        found: the saved state.
        expected: by name a tensor of the same shape, a type, a union of types such as ``int | None``, or None for
            anything.
        owner: whose state it is, for the error.

    Examples:
        >>> check_state({"weight": torch.zeros(2)}, {"weight": torch.zeros(3)}, owner="copy")
        Traceback (most recent call last):
        ...
        ValueError: the state of the copy has shape (2,) of torch.float32 for 'weight', expected (3,) of torch.float32
    """
    names = set(found) if isinstance(found, dict) else set()
    if names != set(expected):
        missing = sorted(expected.keys() - names)
        extra = sorted(map(str, names - expected.keys()))
        raise ValueError(f"the state of the {owner} does not fit: missing {missing[:5]}, unexpected {extra[:5]}")
    for name, wanted in expected.items():
        value = found[name]
        kind = Tensor if isinstance(wanted, Tensor) else wanted
        if isinstance(kind, (type, UnionType)) and not isinstance(value, kind):
            raise ValueError(f"the state of the {owner} has a {type(value).__name__} for {name!r}")
        if kind is Tensor and not (value.shape == wanted.shape and torch.can_cast(value.dtype, wanted.dtype)):
            raise ValueError(
                f"the state of the {owner} has shape {tuple(value.shape)} of {value.dtype} for {name!r}, expected "
                f"{tuple(wanted.shape)} of {wanted.dtype}"
            )
