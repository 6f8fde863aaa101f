"""DCL and DCP beside their relatives: each row has a grid of four values on validation.

DCL and DCP have two rows each, by the distance and by α, which the tables name: a best of two is not quoted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.paper.configuration import BY_BATCH, DCP, Configuration, Experiment
from examples.paper.evidence import KANJI
from examples.paper.gains import Row

Grid = dict[str, Configuration]
LITERAL: dict[str, Any] = {"distance": "squared"} | BY_BATCH

BOTH = "DCL (λ = 0.1) and DCP"
# By validation accuracy in peers-kanji-grids, before any of these was tried on the test images.
CHOSEN = {
    "label smoothing": "0.4",
    "online label smoothing": "0.5",
    "confidence penalty": "1",
    "LogitNorm": "0.04",
    "penalty on the logits": "1",
    "center loss": "0.013",
    "CS-KD": "3",
    "mixup": "0.1",
    "SAM": "0.1",
    "DCL": "0.03",
    "DCL, KL with T = 4": "16",
    "DCP": "1",
    "DCP, α = 0.6": "1",
    BOTH: "1",
}
TWICE = ("SAM", "DCL", "DCL, KL with T = 4", BOTH)  # as much computation as twice the steps


def _options(plain: Configuration, method: str, name: str, values: tuple[float, ...], **fixed: Any) -> Grid:
    """A configuration for each value of one option, by the value."""
    return {f"{value:g}": replace(plain, method=method, options={name: value, **fixed}) for value in values}


def grids(plain: Configuration) -> dict[str, Grid]:
    """What is tried of each method; CE has its learning rate and weight decay from a grid of its own."""
    return {
        "label smoothing": _options(plain, "plain", "label_smoothing", (0.05, 0.1, 0.2, 0.4)),
        "online label smoothing": _options(plain, "plain", "online_label_smoothing", (0.25, 0.5, 0.75, 0.9)),
        "confidence penalty": _options(plain, "plain", "confidence_penalty", (0.03, 0.1, 0.3, 1.0)),
        "LogitNorm": _options(plain, "plain", "logit_norm", (0.02, 0.04, 0.1, 0.2)),
        "penalty on the logits": _options(plain, "plain", "logit_penalty", (0.1, 0.3, 1.0, 3.0)),
        # In DCP's normalisation with 150 classes these are λ = 0.075, 0.3, 0.975 and 3.
        "center loss": _options(plain, "plain", "center_loss", (0.001, 0.004, 0.013, 0.04)),
        "CS-KD": _options(plain, "cs-kd", "weight", (0.3, 1.0, 3.0, 10.0)),
        "mixup": _options(plain, "plain", "mixup", (0.1, 0.2, 0.5, 1.0)),
        "SAM": _options(plain, "plain", "rho", (0.02, 0.05, 0.1, 0.2)),
        "DCL": _options(plain, "dcl", "weight", (0.03, 0.1, 0.3, 1.0), alpha=0.6, distance="squared"),
        # T² = 16 makes the gradient of the divergence as large as without a temperature.
        "DCL, KL with T = 4": _options(
            plain, "dcl", "weight", (1.6, 4.8, 16.0, 48.0), alpha=0.6, distance="kl", temperature=4.0
        ),
        "DCP": _options(plain, "dcp", "weight", (0.1, 0.3, 1.0, 3.0), alpha=0.97, **LITERAL),
        "DCP, α = 0.6": _options(plain, "dcp", "weight", (0.1, 0.3, 1.0, 3.0), alpha=0.6, **LITERAL),
        BOTH: _options(
            plain, "dcl-dcp", "dcp_weight", (0.1, 0.3, 1.0, 3.0), dcl_weight=0.1, dcl_alpha=0.6, dcp_alpha=0.97
        ),
    }


def _chosen(plain: Configuration) -> dict[str, Configuration]:
    """The best of each grid, by validation accuracy."""
    found = grids(plain)
    return {f"{method}, {value}": found[method][value] for method, value in CHOSEN.items()}


def _pairs(plain: Configuration) -> dict[str, Configuration]:
    """DCP beside another method, each with the value that was best alone."""
    options = {method: grids(plain)[method][value].options for method, value in CHOSEN.items()}
    dcp = replace(plain, method="dcp", options=options["DCP"])
    others = ("label smoothing", "mixup", "SAM")
    return {f"DCP and {other}": replace(dcp, options={**dcp.options, **options[other]}) for other in others}


def _tuning(name: str, plain: Configuration) -> Experiment:
    """All grids on validation, three seeds."""
    runs = {f"{method} {value}": run for method, grid in grids(plain).items() for value, run in grid.items()}
    return Experiment(f"grids of the peers on {name}, 4,000 steps", "validation", 3, "CE", {"CE": plain} | runs)


def _comparison(name: str, plain: Configuration) -> Experiment:
    """Each method with its best value, pairs, and plain training of twice the steps; five seeds."""
    runs = {"CE": plain, "CE, twice the steps": replace(plain, epochs=2 * plain.epochs)}
    runs |= _chosen(plain) | _pairs(plain) | {"DCP, auto": replace(plain, method="dcp", options=DCP)}
    return Experiment(f"peers of DCP and DCL on {name}, 4,000 steps", "test", 5, "CE", runs)


def _row(method: str, predictor: str = "model") -> Row:
    return Row(f"{method}, {CHOSEN[method]}", predictor)


EMA = "EMA over 100 steps"
# What a table compares with CE, by what training costs: DCP's company, and DCL's.
PLAIN_COST: dict[str, Row] = {
    "EMA of the weights": Row("CE", EMA),
    "DCP, default": Row("DCP, auto"),
    **{f"{method} ({value})": _row(method) for method, value in CHOSEN.items() if method not in TWICE},
    "DCP and label smoothing": Row("DCP and label smoothing"),
    "DCP and mixup": Row("DCP and mixup"),
    "DCP and EMA of the weights": _row("DCP", EMA),
}
TWICE_THE_COST: dict[str, Row] = {
    "CE, twice the steps": Row("CE, twice the steps"),
    **{f"{method} ({value})": _row(method) for method, value in CHOSEN.items() if method in TWICE},
    "DCP and SAM": Row("DCP and SAM"),
    "DCL: the companion": _row("DCL", "companion"),
    "DCL: the mean of both softmaxes": _row("DCL", "mean of both"),
    "DCL and DCP: the mean of both softmaxes": _row(BOTH, "mean of both"),
}

EXPERIMENTS: dict[str, Experiment] = {
    "peers-kanji-grids": _tuning("kanji", KANJI),
    "peers-kanji": _comparison("kanji", KANJI),
}
