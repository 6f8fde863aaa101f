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


def settled(
    presets: dict[str, dict[str, Any]], name: str, base: Optimizer, distance: Any, **given: Any
) -> dict[str, Any]:
    """Fill what is None among weight, alpha, agreement and reduction from a preset, as far as it fits the others.

    Raises:
        TypeError: the agreement is no number.
        ValueError: the preset is unknown, or the agreement is out of range or cannot go with the base optimizer.

    Examples:
        >>> import torch
        >>> base = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> settled(DCP, "paper", base, "mse", weight=0.3, alpha=None, agreement=None, reduction=None)
        {'weight': 0.3, 'alpha': 0.6, 'agreement': 0.0, 'reduction': 'mean'}
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    found = {key: presets[name][key] if value is None else value for key, value in given.items()}
    if given["reduction"] is None and distance not in ("mse", "l1"):
        found["reduction"] = "mean"  # the other distances have no reduction of their own
    return found | {"agreement": _exponent(found["agreement"], base, given=given["agreement"] is not None)}


def _exponent(agreement: Any, base: Optimizer, given: bool) -> float:
    """The power of the agreement: 0 under LBFGS, which searches along a value that its gradient would not fit."""
    if isinstance(agreement, bool) or not isinstance(agreement, numbers.Real):
        raise TypeError(f"agreement={agreement!r} must be a number, got {type(agreement).__name__}")
    if not 0 <= cast(float, agreement) < float("inf"):
        raise ValueError(f"agreement={agreement!r} must be a finite number of at least 0")
    if not isinstance(base, LBFGS):
        return float(cast(float, agreement))
    if given and agreement:
        raise ValueError(f"agreement={agreement!r} cannot go with LBFGS, which needs the penalty's value; pass 0")
    return 0.0
