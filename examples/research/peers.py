"""DCL and DCP beside their relatives, on the test images of kanji.

Each value was best of four on validation images, three seeds, before it was tried on the test images. DCL and DCP have
two rows each, by the distance and by α, which the tables name: a best of two is not quoted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.research.configuration import BY_BATCH, DCP, Configuration, Experiment
from examples.research.evidence import KANJI
from examples.research.gains import Row

Options = dict[str, Any]
LITERAL: Options = {"distance": "squared"} | BY_BATCH

# By the name in the table: the value that was best, the method and its options, and all values that were tried.
TUNED: dict[str, tuple[str, str, Options, tuple[float, ...]]] = {
    "label smoothing": ("0.4", "plain", {"label_smoothing": 0.4}, (0.05, 0.1, 0.2, 0.4)),
    "online label smoothing": ("0.5", "plain", {"online_label_smoothing": 0.5}, (0.25, 0.5, 0.75, 0.9)),
    "confidence penalty": ("1", "plain", {"confidence_penalty": 1.0}, (0.03, 0.1, 0.3, 1.0)),
    "LogitNorm": ("0.04", "plain", {"logit_norm": 0.04}, (0.02, 0.04, 0.1, 0.2)),
    "penalty on the logits": ("1", "plain", {"logit_penalty": 1.0}, (0.1, 0.3, 1.0, 3.0)),
    # In DCP's normalisation with 150 classes these are λ = 0.075, 0.3, 0.975 and 3.
    "center loss": ("0.013", "plain", {"center_loss": 0.013}, (0.001, 0.004, 0.013, 0.04)),
    "CS-KD": ("3", "cs-kd", {"weight": 3.0}, (0.3, 1.0, 3.0, 10.0)),
    "mixup": ("0.1", "plain", {"mixup": 0.1}, (0.1, 0.2, 0.5, 1.0)),
    "DCL": ("0.03", "dcl", {"weight": 0.03, "alpha": 0.6, "distance": "squared"}, (0.03, 0.1, 0.3, 1.0)),
    # T² = 16 makes the gradient of the divergence as large as without a temperature.
    "DCL, KL with T = 4": (
        "16", "dcl", {"weight": 16.0, "alpha": 0.6, "distance": "kl", "temperature": 4.0}, (1.6, 4.8, 16.0, 48.0)
    ),
    "DCP": ("1", "dcp", {"weight": 1.0, "alpha": 0.97, **LITERAL}, (0.1, 0.3, 1.0, 3.0)),
    "DCP, α = 0.6": ("1", "dcp", {"weight": 1.0, "alpha": 0.6, **LITERAL}, (0.1, 0.3, 1.0, 3.0)),
}  # fmt: skip
TWICE = ("DCL", "DCL, KL with T = 4")  # as much computation as twice the steps
EMA = "EMA over 100 steps"


def _comparison(plain: Configuration) -> Experiment:
    """Each method with its best value, DCP beside two of them, and plain training of twice the steps."""
    runs = {"CE": plain, "CE, twice the steps": replace(plain, epochs=2 * plain.epochs)}
    for name, (value, method, options, _) in TUNED.items():
        runs[f"{name}, {value}"] = replace(plain, method=method, options=options)
    for other in ("label smoothing", "mixup"):
        runs[f"DCP and {other}"] = replace(plain, method="dcp", options=TUNED["DCP"][2] | TUNED[other][2])
    runs["DCP, auto"] = replace(plain, method="dcp", options=DCP)
    return Experiment("peers of DCP and DCL on kanji, 4,000 steps", "test", 5, "CE", runs)


# What a table compares with CE, by what training costs: DCP's company, and DCL's.
_ROWS = {name: (f"{name} ({value})", Row(f"{name}, {value}")) for name, (value, *_) in TUNED.items()}
PLAIN_COST: dict[str, Row] = {
    "EMA of the weights": Row("CE", EMA),
    "DCP, default": Row("DCP, auto"),
    **dict(row for name, row in _ROWS.items() if name not in TWICE),
    "DCP and label smoothing": Row("DCP and label smoothing"),
    "DCP and mixup": Row("DCP and mixup"),
    "DCP and EMA of the weights": replace(_ROWS["DCP"][1], predictor=EMA),
}
TWICE_THE_COST: dict[str, Row] = {
    "CE, twice the steps": Row("CE, twice the steps"),
    **dict(_ROWS[name] for name in TWICE),
}

EXPERIMENTS: dict[str, Experiment] = {"peers-kanji": _comparison(KANJI)}
