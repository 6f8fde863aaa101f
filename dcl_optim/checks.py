"""Checks of arguments: each raises TypeError or ValueError with the argument's name and value."""

from __future__ import annotations

import numbers
import operator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.wrapper import parameters_of


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


def check_modules(base: Optimizer, model: Any, criterion: Any) -> None:
    """Demand a model that the base optimizer trains, and a criterion whose calls hooks see."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if criterion is not None and not isinstance(criterion, nn.Module):
        raise TypeError(f"criterion must be a module that is called with (input, target), got {criterion!r}")
    if criterion is not None and type(criterion).__call__ is not nn.Module.__call__:
        raise TypeError(
            f"criterion's class {type(criterion).__name__} overrides __call__, which passes hooks by; pass loss_scale= "
            "(and the labels to DCP as targets= or by set_targets) instead"
        )
    if any(group.get("maximize") for group in base.param_groups) or getattr(base, "maximize", False):
        raise ValueError(
            "base_optimizer has maximize=True, which would maximise the penalty too; negate the loss instead"
        )
    if not {id(p) for p in parameters_of(base)} & {id(p) for p in model.parameters()}:
        raise ValueError("model shares no parameters with base_optimizer; pass the model that this optimizer trains")
