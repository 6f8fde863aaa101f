"""The values of weight and alpha when they are not given: ours, and the paper's.

The paper's λ = 1 is for 100 classes and 200 epochs and loses to plain training in shorter ones; docs/results.md has the
measurements that ours were chosen by.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

Preset = Literal["default", "paper"]
PRESETS: tuple[Preset, ...] = get_args(Preset)

DCL: dict[str, dict[str, Any]] = {
    "default": {"weight": 0.1, "alpha": 0.6},
    "paper": {"weight": 1.0, "alpha": 0.6},
}
DCP: dict[str, dict[str, Any]] = {
    "default": {"weight": 0.1, "alpha": 0.97},
    "paper": {"weight": 1.0, "alpha": 0.6},
}


def settled(presets: dict[str, dict[str, Any]], name: str, **given: Any) -> dict[str, Any]:
    """Fill what is None among weight and alpha from a preset.

    Raises:
        ValueError: the preset is unknown.

    Examples:
        >>> settled(DCP, "paper", weight=0.3, alpha=None)
        {'weight': 0.3, 'alpha': 0.6}
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return {key: presets[name][key] if value is None else value for key, value in given.items()}
