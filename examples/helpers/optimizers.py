"""Plain training, DCL or DCP by name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer

METHODS = ("plain", "dcl", "dcp")


def build_optimizer(method: str, base: Optimizer, model: nn.Module, **options: Any) -> Optimizer:
    """Wrap an optimizer by the method's name, or give it back as it is for ``plain``.

    Args:
        method: one of :data:`METHODS`.
        base: of the model's weights.
        model: what is trained.
        options: the wrapper's keyword arguments; None stands for its default.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method == "plain":
        return base
    given = {name: value for name, value in options.items() if value is not None}
    return DCLOptimizer(base, model, **given) if method == "dcl" else DCPOptimizer(base, model, **given)
