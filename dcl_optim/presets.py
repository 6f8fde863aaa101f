"""The values that arguments have when they are not given: two sets of them, ours and the paper's.

Ours keep the penalty from doing harm where the paper's λ = 1, which is for 100 classes and 200 epochs, does: with few
classes, and while model and forecast do not know the answer yet. docs/results.md has the measurements.
"""

from __future__ import annotations

import numbers
from typing import Any, cast

from torch.optim import LBFGS, Optimizer

PRESETS = ("safe", "paper")

DCL: dict[str, dict[str, Any]] = {
    "safe": {"weight": 1.0, "alpha": 0.6, "reduction": "padded_mean", "agreement": 2.0},
    "paper": {"weight": 1.0, "alpha": 0.6, "reduction": "mean", "agreement": 0.0},
}
DCP: dict[str, dict[str, Any]] = {
    "safe": {"weight": 0.3, "alpha": 0.97, "reduction": "padded_mean", "agreement": 2.0},
    "paper": {"weight": 1.0, "alpha": 0.6, "reduction": "mean", "agreement": 0.0},
}


def chosen(presets: dict[str, dict[str, Any]], name: str, **given: Any) -> dict[str, Any]:
    """Fill what is None among the given arguments from a preset.

    Raises:
        ValueError: the preset is unknown.

    Examples:
        >>> chosen(DCP, "paper", weight=0.3, alpha=None, reduction=None)
        {'weight': 0.3, 'alpha': 0.6, 'reduction': 'mean'}
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return {key: presets[name][key] if value is None else value for key, value in given.items()}


def reduction_of(distance: Any, given: str | None, settings: dict[str, Any]) -> str:
    """The reduction that was given, or the preset's; the distances that have none are left at their mean."""
    if given is not None:
        return given
    return str(settings["reduction"]) if distance in ("mse", "l1") else "mean"


def exponent_of(agreement: Any, base: Optimizer, given: bool) -> float:
    """The power of the agreement: 0 under LBFGS, which searches along a value that its gradient would not fit.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or not finite, or was given and cannot go with LBFGS.
    """
    if isinstance(agreement, bool) or not isinstance(agreement, numbers.Real):
        raise TypeError(f"agreement={agreement!r} must be a number, got {type(agreement).__name__}")
    if not 0 <= cast(float, agreement) < float("inf"):
        raise ValueError(f"agreement={agreement!r} must be a finite number of at least 0")
    if not isinstance(base, LBFGS):
        return float(cast(float, agreement))
    if given and agreement:
        raise ValueError(f"agreement={agreement!r} cannot go with LBFGS, which needs the penalty's value; pass 0")
    return 0.0
