"""The methods and their values: three of each, log-spaced about what the papers and earlier runs suggest.

The first value of a method is the one that is run first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from examples.research.configuration import DCL, DCP, PAPER, Configuration

Make = Callable[[Configuration], Configuration]


def _by(method: str, **options: Any) -> Make:
    return lambda plain: replace(plain, method=method, options=options)


def _decay(value: float) -> Make:
    return lambda plain: replace(plain, weight_decay=value)


def _rate(factor: float, decay: float | None = None) -> Make:
    """The learning rate times a factor, and another weight decay."""

    def make(plain: Configuration) -> Configuration:
        return replace(plain, lr=factor * plain.lr, weight_decay=plain.weight_decay if decay is None else decay)

    return make


def _twice(plain: Configuration) -> Configuration:
    return replace(plain, epochs=2 * plain.epochs)


def _symmetric(forward: float, reverse: float) -> Make:
    return _by("plain", forward_weight=forward, reverse=reverse)


def _elr(weight: float, momentum: float) -> Make:
    return _by("plain", early_learning=weight, early_learning_momentum=momentum)


# By the method's name and the value's name.
METHODS: dict[str, dict[str, Make]] = {
    "DCP": {"default": _by("dcp", **DCP)},
    "SCE": {"0.5 + 1": _symmetric(0.5, 1.0), "0.1 + 1": _symmetric(0.1, 1.0), "6 + 0.1": _symmetric(6.0, 0.1)},
    "center loss": {f"{value:g}": _by("plain", center_loss=value) for value in (0.013, 0.004, 0.04)},
    "ELR": {"3, 0.7": _elr(3.0, 0.7), "7, 0.9": _elr(7.0, 0.9), "1, 0.7": _elr(1.0, 0.7)},
    "GCE": {f"{value:g}": _by("plain", generalized=value) for value in (0.3, 0.7, 0.1)},
    "label smoothing": {f"{value:g}": _by("plain", label_smoothing=value) for value in (0.2, 0.4, 0.1)},
    "weight decay": {f"{value:g}": _decay(value) for value in (5e-3, 2e-3, 2e-2)},
    "logit penalty": {f"{value:g}": _by("plain", logit_penalty=value) for value in (0.3, 1.0, 0.1)},
    "mixup": {f"{value:g}": _by("plain", mixup=value) for value in (0.3, 0.1, 1.0)},
    "online label smoothing": {f"{value:g}": _by("plain", online_label_smoothing=value) for value in (0.5, 0.8, 0.25)},
    "SAF": {f"{value:g}": _by("saf", weight=value) for value in (0.3, 1.0, 0.1)},
    "CS-KD": {f"{value:g}": _by("cs-kd", weight=value) for value in (1.0, 3.0, 0.3)},
    "SAM": {f"{value:g}": _by("plain", rho=value) for value in (0.1, 0.2, 0.05)},
    "PS-KD": {f"{value:g}": _by("ps-kd", alpha=value) for value in (0.8, 0.5)},
    "Mean Teacher": {f"{value:g}": _by("mean-teacher", weight=value) for value in (100.0, 10.0)},
    "DCL": {"0.1": _by("dcl", **DCL | {"distance": "mse"}), "1": _by("dcl", **PAPER | {"distance": "mse"})},
    "DML": {f"{value:g}": _by("dml", weight=value) for value in (1.0, 3.0)},
    "CE, twice the epochs": {"": _twice},
    "GAM": {f"{value:g}": _by("gam", rho=value) for value in (0.2, 0.05)},
}
# Learning rates, as multiples of the setting's, and weight decays of plain training; beside CE and the rows of weight
# decay.
RATES: dict[str, Make] = {
    "lr / 3": _rate(1 / 3),
    "lr × 3": _rate(3.0),
    "lr / 3, weight decay 0.02": _rate(1 / 3, 2e-2),
    "lr × 3, weight decay 0.002": _rate(3.0, 2e-3),
}


def label_of(method: str, value: str) -> str:
    """The row of a method's value."""
    return f"{method} {value}".strip()


LABELS = {method: [label_of(method, value) for value in values] for method, values in METHODS.items()}
PLAIN = ["CE", *LABELS["weight decay"], *RATES]


def rows(plain: Configuration) -> dict[str, Configuration]:
    """All runs of a setting, by their row: first each method's first value, then the others, then learning rates."""
    made: dict[str, Configuration] = {"CE": plain}
    deepest = max(len(values) for values in METHODS.values())
    for place in range(deepest):
        for method, values in METHODS.items():
            for value in list(values)[place : place + 1]:
                made[label_of(method, value)] = values[value](plain)
    return made | {label: make(plain) for label, make in RATES.items()}


def can_have_dcp(configuration: Configuration) -> bool:
    """Whether a run is one training step that DCP can be added to, as a term of its loss."""
    return configuration.method == "plain"


def with_dcp(configuration: Configuration) -> Configuration:
    """The same run with DCP's default added to it."""
    return replace(configuration, method="dcp", options=DCP | dict(configuration.options))


def on_top(plain: Configuration) -> dict[str, Configuration]:
    """Runs of a setting with DCP added, by their row."""
    found = {top_label(label): with_dcp(run) for label, run in rows(plain).items() if can_have_dcp(run)}
    return {"CE": plain} | found


def top_label(label: str) -> str:
    """The row of another row's run with DCP added."""
    return f"{label}, with DCP"
