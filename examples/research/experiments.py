"""The experiments by name: which runs are compared, on which part of which data, over how many seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.research import evidence, fraction, pays, size, tabular, wrong_labels
from examples.research.configuration import BY_BATCH, DCL, DCP_01, PAPER, Configuration, Experiment
from examples.research.pays import DIGITS
from examples.research.rivals import experiments as rivals

FASHION = Configuration("fashion-mnist", "small-cnn", "plain", epochs=50, train_size=5_000)
SCRIPTS = Configuration("noto-scripts", "small-cnn", "plain", epochs=40, train_size=8_000)

LONG = {"digits": DIGITS, "fashion": FASHION, "scripts": SCRIPTS}
SHORT = {
    "digits": replace(DIGITS, epochs=15, train_size=200),
    "fashion": replace(FASHION, epochs=10, train_size=2_000, batch_size=64, lr=0.05),
    "scripts": replace(SCRIPTS, epochs=8),
}


def _dcl(plain: Configuration, **options: Any) -> Configuration:
    return replace(plain, method="dcl", options=PAPER | options)


def _dcp(plain: Configuration, **options: Any) -> Configuration:
    return replace(plain, method="dcp", options=PAPER | BY_BATCH | options)


def _main(plain: Configuration) -> dict[str, Configuration]:
    return {
        "CE": plain,
        "DCL": _dcl(plain, **DCL),
        "DCL, preset paper": _dcl(plain),
        "DCP, λ = 0.1": _dcp(plain, **DCP_01),
        "DCP, preset paper": _dcp(plain),
    }


def _defaults(kind: str, seeds: int, settings: dict[str, Configuration]) -> dict[str, Experiment]:
    """The defaults against plain training and the paper's settings, on the images of choices."""
    return {
        f"defaults-{name}-{kind}": Experiment(
            f"the defaults on {name}, {kind}", "validation", seeds, "CE", _main(plain)
        )
        for name, plain in settings.items()
    }


EXPERIMENTS: dict[str, Experiment] = {
    **_defaults("short", 5, SHORT),
    **_defaults("long", 3, LONG),
    **evidence.EXPERIMENTS,
    **pays.EXPERIMENTS,
    **size.EXPERIMENTS,
    **rivals.EXPERIMENTS,
    **wrong_labels.EXPERIMENTS,
    **tabular.EXPERIMENTS,
    **fraction.EXPERIMENTS,
}
