"""The experiments by name: which runs are compared, on which part of which data, over how many seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.paper.configuration import Configuration, Experiment

FASHION = Configuration("fashion-mnist", "small-cnn", "plain", epochs=50, train_size=5_000)
SCRIPTS = Configuration("noto-scripts", "small-cnn", "plain", epochs=40, train_size=8_000)
DIGITS = Configuration("digits", "small-cnn", "plain", epochs=100, batch_size=32, lr=0.05)
CIFAR = Configuration("cifar100", "resnet18", "plain", epochs=200, augmentation="authors")

SHORT = {
    "digits": replace(DIGITS, epochs=15, train_size=200),
    "fashion": replace(FASHION, epochs=10, train_size=2_000, batch_size=64, lr=0.05),
    "scripts": replace(SCRIPTS, epochs=8),
}

PAPER: dict[str, Any] = {"preset": "paper"}
FRACTIONS = (0.1, 0.25, 0.5, 0.75)
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)


def _dcl(plain: Configuration, **options: Any) -> Configuration:
    return replace(plain, method="dcl", options=PAPER | options)


def _main(plain: Configuration) -> dict[str, Configuration]:
    return {
        "CE": plain,
        "DCL": replace(plain, method="dcl"),
        "DCL, preset paper": _dcl(plain),
        "DCP": replace(plain, method="dcp"),
        "DCP, preset paper": replace(plain, method="dcp", options=PAPER),
    }


def _baselines(plain: Configuration) -> dict[str, Configuration]:
    names = {
        "SAM": "sam",
        "GAM": "gam",
        "DML": "dml",
        "PS-KD": "ps-kd",
        "SAF": "saf",
        "EMA": "ema",
        "Mean Teacher": "mean-teacher",
        "snapshot": "snapshot",
        "voting, 2 networks": "voting",
        "bagging, 2 networks": "bagging",
    }
    twice = {"CE, twice the epochs": replace(plain, epochs=2 * plain.epochs)}
    return _main(plain) | twice | {label: replace(plain, method=method) for label, method in names.items()}


def _ablation(title: str, runs: dict[str, Configuration]) -> Experiment:
    return Experiment(title, "validation", 3, "CE", {"CE": SCRIPTS} | runs)


def _defaults(length: str, seeds: int, settings: dict[str, Configuration]) -> dict[str, Experiment]:
    """The defaults against plain training and the paper's settings, on the pictures that they were chosen on."""
    title = "the defaults in {} training on {}"
    return {
        f"defaults-{name}-{length}": Experiment(title.format(length, name), "validation", seeds, "CE", _main(plain))
        for name, plain in settings.items()
    }


EXPERIMENTS: dict[str, Experiment] = {
    **_defaults("short", 5, SHORT),
    **_defaults("long", 3, {"digits": DIGITS, "fashion": FASHION, "scripts": SCRIPTS}),
    "main-fashion": Experiment("CE, DCL and DCP on Fashion-MNIST, 10,000 pictures", "test", 5, "CE", _main(FASHION)),
    "main-scripts": Experiment("CE, DCL and DCP on 100 scripts", "test", 5, "CE", _main(SCRIPTS)),
    "main-cifar100": Experiment(
        "CE, DCL and DCP as in the paper's Table 1; wants a GPU", "test", 3, "CE", _main(CIFAR)
    ),
    "baselines": Experiment("what else costs as much, on 100 scripts", "test", 3, "CE", _baselines(SCRIPTS)),
    "alpha": _ablation(
        "α on 100 scripts (Tables 11 and 12)",
        {f"α = {alpha:g}": _dcl(SCRIPTS, alpha=alpha) for alpha in ALPHAS}
        | {"α = (t-1)/t": _dcl(SCRIPTS, alpha="running-average")},
    ),
    "distance": _ablation(
        "the distance on 100 scripts (Table 6)",
        {distance: _dcl(SCRIPTS, distance=distance) for distance in ("mse", "l1", "kl", "infonce")},
    ),
    "rate": _ablation(
        "the companion's learning rate on 100 scripts",
        {f"η_ω = {scale:g} η_θ": _dcl(SCRIPTS, companion_lr_scale=scale) for scale in (0.5, 1.0, 2.0)},
    ),
    "companion": _ablation(
        "smaller companions on 100 scripts (Table 9)",
        {name: _dcl(replace(SCRIPTS, network="resnet10-s"), companion=name) for name in ("resnet10-s", "resnet10-xs")},
    ),
    "fraction": _ablation(
        "the companion's part of the batch on 100 scripts (Table 10)",
        {f"{100 * part:g} %": _dcl(SCRIPTS, companion_fraction=part) for part in FRACTIONS} | {"100 %": _dcl(SCRIPTS)},
    ),
}
