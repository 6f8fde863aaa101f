"""Plain training, DCL or DCP by name, and their penalty."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
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


def penalty(optimizer: Optimizer, z: Tensor, y: Tensor | None = None) -> Tensor | float:
    """The penalty as a term of the loss; 0 for an optimizer that is not wrapped.

    Args:
        optimizer: what :func:`build_optimizer` gave.
        z: the logits that the model returned.
        y: their labels, which DCP needs.
    """
    if isinstance(optimizer, DCPOptimizer):
        assert y is not None
        return optimizer.penalty(z, y)
    return optimizer.penalty(z) if isinstance(optimizer, DCLOptimizer) else 0.0
