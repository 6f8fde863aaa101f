"""The experiments by name: which runs are compared, on which part of which data, over how many seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.research import evidence, losses, pays, peers, size, tabular, wrong_labels
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

# What the paper's settings have already (α = 0.6, mse, the model's learning rate) is named by {}, so that it is one run
# for all ablations.
ALPHAS: dict[str, dict[str, Any]] = {
    f"α = {alpha:g}": {} if alpha == 0.6 else {"alpha": alpha}
    for alpha in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
} | {"α = (t-1)/t": {"alpha": "running-average"}}
DISTANCES: dict[str, dict[str, Any]] = {"mse": {}} | {name: {"distance": name} for name in ("l1", "kl", "infonce")}
RATES: dict[str, dict[str, Any]] = {
    f"η_ω = {scale:g} η_θ": {} if scale == 1 else {"companion_lr_scale": scale} for scale in (0.5, 1.0, 2.0)
}
COMPANIONS: dict[str, dict[str, Any]] = {
    "the model's twin": {},
    "half as wide": {"companion": "small-cnn-half"},
    "a quarter as wide": {"companion": "small-cnn-quarter"},
}
# The share of each batch's rows that the companion learns from.
FRACTIONS: dict[str, dict[str, Any]] = {
    f"a share of {share:g}": {} if share == 1 else {"companion_fraction": share} for share in (0.1, 0.2, 0.5, 0.8, 1.0)
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


def _ablation(
    title: str, options: dict[str, dict[str, Any]], plain: Configuration = SCRIPTS, data: str = "100 scripts"
) -> Experiment:
    runs = {label: _dcl(plain, **chosen) for label, chosen in options.items()}
    return Experiment(f"{title}, on {data}", "validation", 3, "CE", {"CE": plain} | runs)


def _defaults(kind: str, seeds: int, settings: dict[str, Configuration]) -> dict[str, Experiment]:
    """The defaults against plain training, the paper's settings and what else was tried, on the images of choices."""
    found = {}
    for name, plain in settings.items():
        tried = {
            "DCL, λ grows to 1 over half of the training": _dcl(plain, weight="warm-up"),
            "DCP, λ = 0.3, α = 0.97": _dcp(plain, weight=0.3, alpha=0.97),
            "DCP, λ = 1, α = 0.97": _dcp(plain, weight=1.0, alpha=0.97),
        }
        title = f"the defaults on {name}, {kind}"
        found[f"defaults-{name}-{kind}"] = Experiment(title, "validation", seeds, "CE", _main(plain) | tried)
    return found


EXPERIMENTS: dict[str, Experiment] = {
    **_defaults("short", 5, SHORT),
    **_defaults("long", 3, LONG),
    "alpha": _ablation("α (Table 11)", ALPHAS),
    "distance": _ablation("the distance (Table 6)", DISTANCES),
    "rate": _ablation("the companion's learning rate", RATES),
    "companion": _ablation("smaller companions (Table 9)", COMPANIONS),
    "fraction-scripts": _ablation("the rows that the companion learns from (Table 10)", FRACTIONS),
    **evidence.EXPERIMENTS,
    **pays.EXPERIMENTS,
    **peers.EXPERIMENTS,
    **size.EXPERIMENTS,
    **rivals.EXPERIMENTS,
    **losses.EXPERIMENTS,
    **wrong_labels.EXPERIMENTS,
    **tabular.EXPERIMENTS,
}
