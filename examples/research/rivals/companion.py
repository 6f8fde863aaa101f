"""DCL's default, its controls, and the network to keep; fixed before the runs.

DCL has a pair (λ, α), and gives three predictors: the model, its companion, and the mean of their softmaxes. Each run
has the validation and test accuracy of all three.

**The default** is the pair that was ahead of λ = 0.1, α = 0.6 on the test images of the five settings that the search
left out, in three rounds of new seeds; commit 0faeaf8 has the search with its rules and its tables.

**Controls**, in the same seeds: a companion that never learns; λ = 0 with the companion kept; the penalty toward an
average of the weights in place of the companion; averages of plain training's weights; the logit penalty (of the
rivals). Each has the value with the largest mean validation gain in the setting.

**The network to keep.** By run, the predictor with the largest validation accuracy, the model if two are equal. Plain
training has its one.

**In new seeds.** All settings have the default, and the best pair and the best value of each control for the setting,
by the validation accuracy of the predictor that is kept, in the seeds of ``CHOSEN_ROUNDS``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from examples.research import records
from examples.research.configuration import DCL, Configuration, Experiment
from examples.research.rivals import choice
from examples.research.rivals.settings import CHOICE_ROUNDS, FAST, PLACES

WEIGHTS = (0.1, 0.3, 1.0)
ALPHAS = (0.6, 0.97, 0.99, 0.9, 0.0)
DEFAULT = (0.1, 0.99)
SLOW = (0.97, 0.99)  # of the companion that is kept where λ = 0
AVERAGES = (0.99, 0.998, 0.9995)  # decays for a step of the averages of plain training's weights
DECAY = 0.998  # of the average that takes the companion's place
NEVER = 10**9  # steps between two of a companion that never learns

KEPT = "kept"  # the predictor that is best on the run's validation images
PREDICTORS = ("model", "companion", "mean of both", KEPT)

Pair = tuple[float, float]
PAIRS: list[Pair] = [(weight, alpha) for alpha in ALPHAS for weight in WEIGHTS]


def pair_row(pair: Pair) -> str:
    """The name of a pair's row."""
    return f"DCL, λ = {pair[0]:g}, α = {pair[1]:g}"


def _dcl(plain: Configuration, weight: float, alpha: float, **options: float) -> Configuration:
    own = {"weight": weight, "alpha": alpha, "distance": "mse"}
    return replace(plain, method="dcl", options=DCL | own | options)


AVERAGED = "CE, averages of the weights"
NEVER_ROWS = [f"never learns, λ = {weight:g}" for weight in WEIGHTS]
ZERO_ROWS = [f"λ = 0, α = {alpha:g}" for alpha in SLOW]
TOWARD_ROWS = [f"toward an average, λ = {weight:g}" for weight in WEIGHTS]
# By the name of the control; the row of the averages has one run, whose predictors are the values.
CONTROLS = {"never learns": NEVER_ROWS, "λ = 0": ZERO_ROWS, "toward an average": TOWARD_ROWS}


def rows(plain: Configuration) -> dict[str, Configuration]:
    """All runs of a setting, by their row."""
    made = {"CE": plain} | {pair_row(pair): _dcl(plain, *pair) for pair in PAIRS}
    for label, alpha in zip(ZERO_ROWS, SLOW, strict=True):
        made[label] = _dcl(plain, 0.0, alpha)
    for label, weight in zip(NEVER_ROWS, WEIGHTS, strict=True):
        made[label] = _dcl(plain, weight, 0.6, companion_every=NEVER)
    for label, weight in zip(TOWARD_ROWS, WEIGHTS, strict=True):
        options = {"weight": weight, "ramp_up": 0, "decay": DECAY, "of_logits": True}
        made[label] = replace(plain, method="mean-teacher", options=options)
    return made | {AVERAGED: replace(plain, averages=AVERAGES)}


def name_of(place: str) -> str:
    """The experiment of a setting."""
    return f"rivals-companion-{place}"


EXPERIMENTS = {
    name_of(name): Experiment(
        f"DCL's default and its controls: {place.title}",
        "both",
        len(CHOICE_ROUNDS) * place.seeds,
        "CE",
        rows(place.plain),
    )
    for name, place in FAST.items()
}


def _variants() -> dict[str, Configuration]:
    """Digits with wrong labels in other networks and with AdamW, which divides a constant factor as 1 - α out."""
    plain = FAST["digits-30-noise-30"].plain
    adamw = replace(plain, optimizer="adamw", lr=1e-3, weight_decay=1e-2)
    networks = {
        "CNN": plain,
        "larger CNN with dropout": replace(plain, network="cnn"),
        "MLP": replace(plain, network="mlp"),
        "CNN, AdamW": adamw,
        "ResNet-10": replace(plain, network="resnet10-m"),
    }
    made = {}
    for title, variant in networks.items():
        made[f"{title}: CE"] = variant
        made[f"{title}: DCL"] = _dcl(variant, 0.1, 0.99)
    made["CNN, AdamW: DCL, companion_lr_scale 0.01"] = _dcl(adamw, 0.1, 0.0, companion_lr_scale=0.01)
    return made


VARIANTS = "companion-variants"
EXPERIMENTS[VARIANTS] = Experiment(
    "the companion with other networks and with AdamW, on digits, 30 of each, 30 % wrong",
    "both",
    3,
    "CNN: CE",
    _variants(),
)


def scores(
    found: Sequence[records.Record], part: str, predictor: str, seeds: Collection[int]
) -> dict[str, dict[int, float]]:
    """The accuracies of records in percent, by row and seed, of a predictor, or the model's where it is the only one.

    Args:
        found: the records of a setting.
        part: "validation" or "test".
        predictor: one of PREDICTORS, or the name of another one.
        seeds: those to take.
    """
    accuracies: dict[str, dict[int, float]] = {}
    for record in found:
        if record["seed"] in seeds:
            measured = record["accuracy" if part == "test" else "validation_accuracy"]
            name = predictor
            if predictor == KEPT:
                name = kept(record)
            elif predictor not in measured:
                name = "model"
            accuracies.setdefault(record["label"], {})[record["seed"]] = 100 * float(measured[name])
    return accuracies


def kept(record: records.Record) -> str:
    """The predictor of a run that is best on its validation images; the model if another one is only as good."""
    measured = record["validation_accuracy"]
    return max(measured, key=lambda name: (measured[name], name == "model"))


def of_place(
    folder: Path, place: str, part: str, predictor: str, rounds: Sequence[int] = CHOICE_ROUNDS
) -> dict[str, dict[int, float]]:
    """The same of a setting, in the seeds of some rounds."""
    seeds = {seed for one in rounds for seed in PLACES[place].of_round(one)}
    return scores(records.finished(folder, f"{name_of(place)}.jsonl"), part, predictor, seeds)


def tuned(folder: Path, place: str) -> dict[str, str]:
    """The best pair of a setting and the best value of each control, by the validation accuracy of what is kept."""
    found = of_place(folder, place, "validation", KEPT)
    families = {"DCL": [pair_row(pair) for pair in PAIRS], **CONTROLS}
    best = {family: choice.tuned(found, labels) for family, labels in families.items()}
    return {family: label for family, label in best.items() if label is not None}
