"""Where the regularisers pay: long trainings, other methods, noise and controls, on data new to the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from examples.paper import peers
from examples.paper.configuration import DEFAULT_DCL, DEFAULT_DCP, PAPER, Configuration, Experiment
from examples.paper.gains import Row

# 4,000 steps each: of these sizes an epoch has 25 and 250.
KANJI = Configuration(
    "kanji-fonts", "strided-cnn", "plain", 160, train_size=800, batch_size=32, lr=0.3, averages=(0.99, 0.999)
)
SCRIPTS = replace(KANJI, data="noto-scripts", network="small-cnn", epochs=16, train_size=8_000, lr=0.1)
SETTINGS = {"kanji": KANJI, "scripts": SCRIPTS}
TITLES = {"kanji": "150 kanji in unseen fonts", "scripts": "100 writing systems, unseen letters"}

DCL, DCP = PAPER | DEFAULT_DCL, PAPER | DEFAULT_DCP

RATES = (0.03, 0.1, 0.3, 1.0)
DECAYS = (1e-4, 5e-4, 2e-3)
LENGTHS = {"1k": 1 / 4, "4k": 1, "16k": 4, "64k": 16}  # steps, and how many times those of the settings they are


# The curves of the plots over the length; the average of the weights is CE's own.
CURVES = {
    "EMA": Row("CE", "EMA over 100 steps"),
    "label smoothing 0.1": Row("label smoothing 0.1"),
    "DCL": Row("DCL"),
    "DCL, λ = 1": Row("DCL, λ = 1"),
    "DCP": Row("DCP"),
    "DCP, λ = 1, α = 0.6": Row("DCP, λ = 1, α = 0.6"),
}


# Where the gains are tested, each with ten seeds.
FASHION = Configuration("fashion-mnist", "small-cnn", "plain", 50, train_size=5_000, averages=(0.99, 0.999))
PLACES: dict[str, tuple[str, Configuration]] = {
    "fashion-5k": ("Fashion-MNIST, 5,000 images", FASHION),
    "fashion-50k": ("Fashion-MNIST, 50,000 images", replace(FASHION, train_size=None, epochs=10)),
    "kanji": (f"{TITLES['kanji']}, 16,000 steps", replace(KANJI, epochs=640)),
    "scripts": (f"{TITLES['scripts']}, 16,000 steps", replace(SCRIPTS, epochs=64)),
    "debian": (
        "40 sections of Debian from a line of text",
        Configuration("debian-sections", "mlp", "plain", 20, batch_size=64, lr=0.05, weight_decay=5e-3),
    ),
}
PAYS = {f"pays-{name}": title for name, (title, _) in PLACES.items()}
FOREST = {"DCP, at plain training's cost": Row("DCP"), "DCL, at twice the cost": Row("DCL")}
TESTED = {label: Row(label) for label in ("label smoothing 0.1", "DCL", "DCP")} | {
    "DCL's model and companion averaged": Row("DCL", "mean of both")
}


def _with(plain: Configuration, method: str, **options: Any) -> Configuration:
    return replace(plain, method=method, options=options)


def _compared(plain: Configuration) -> dict[str, Configuration]:
    """What is compared at each length; CE's averages of the weights are the rows EMA."""
    return {
        "CE": plain,
        "label smoothing 0.1": _with(plain, "plain", label_smoothing=0.1),
        "DCL": _with(plain, "dcl", **DCL),
        "DCL, λ = 1": _with(plain, "dcl", **PAPER),
        "DCP": _with(plain, "dcp", **DCP),
        "DCP, λ = 1, α = 0.6": _with(plain, "dcp", **PAPER),
    }


def _label(lr: float, decay: float) -> str:
    return f"lr {lr:g}, weight decay {decay:g}"


def _tuning(name: str, plain: Configuration, rates: Sequence[float], decays: Sequence[float]) -> Experiment:
    """The grid that a setting's learning rate and weight decay come from; they are the baseline."""
    grid = {_label(lr, decay): replace(plain, lr=lr, weight_decay=decay) for lr in rates for decay in decays}
    title = f"learning rate and weight decay of plain training on {name}"
    return Experiment(title, "validation", 2, _label(plain.lr, plain.weight_decay), grid)


def _comparison(setting: str, plain: Configuration, seeds: int = 5) -> Experiment:
    return Experiment(f"CE, label smoothing, DCL and DCP on {setting}", "test", seeds, "CE", _compared(plain))


def _lengths(name: str, plain: Configuration) -> dict[str, Experiment]:
    return {
        f"length-{name}-{length}": _comparison(
            f"{name}, {length} steps",
            replace(plain, epochs=round(times * plain.epochs)),
            seeds=3 if length == "64k" else 5,
        )
        for length, times in LENGTHS.items()
    }


def _data() -> dict[str, Experiment]:
    """From a tenth of the training images of kanji to all, in about 4,000 steps; 800 are ``length-kanji-4k``."""
    return {
        f"data-kanji-{size}": _comparison(
            f"{size:,} of 4,800 kanji, 4,000 steps", replace(KANJI, train_size=size, epochs=epochs)
        )
        for size, epochs in ((480, 267), (1_600, 80), (4_800, 27))
    }


def _noise() -> dict[str, Experiment]:
    return {
        f"noise-kanji-{percent}": _comparison(
            f"kanji with {percent} % wrong labels, 4,000 steps", replace(KANJI, label_noise=percent / 100)
        )
        for percent in (20, 40)
    }


def _controls() -> Experiment:
    """What would show the gain to be something simpler, all with λ = 1, and DCP with both values of α to compare."""
    never = 10**9
    found = {
        "CE": KANJI,
        "DCP": _with(KANJI, "dcp", **DCP),
        "DCP, λ = 1, α = 0.6": _with(KANJI, "dcp", **PAPER),
        "DCP, λ = 1": _with(KANJI, "dcp", weight=1.0, alpha=0.97),
        "λ = 1, penalty on the logits": _with(KANJI, "plain", logit_penalty=1.0),
        "λ = 1, α = 0: the class's mean in the last batch that had it": _with(KANJI, "dcp", weight=1.0, alpha=0.0),
        "λ = 1, prototypes of the first epoch": _with(KANJI, "dcp", weight=1.0, alpha="frozen-after-first-epoch"),
        "λ = 1, random prototypes": _with(KANJI, "dcp", weight=1.0, random_prototypes=1.0),
        "λ = 1, random prototypes, three times as large": _with(KANJI, "dcp", weight=1.0, random_prototypes=3.0),
        "λ = 1, a companion that never learns": _with(KANJI, "dcl", **PAPER, companion_every=never),
    }
    return Experiment("controls: what else would give DCP's gain, kanji, 4,000 steps", "test", 5, "CE", found)


def _pays(title: str, plain: Configuration) -> Experiment:
    runs = {
        label: run for label, run in _compared(plain).items() if label in ("CE", "label smoothing 0.1", "DCL", "DCP")
    }
    return Experiment(f"CE, label smoothing, DCL and DCP: {title}", "test", 10, "CE", runs)


EXPERIMENTS: dict[str, Experiment] = {
    **{f"tune-{name}": _tuning(name, plain, RATES, DECAYS) for name, plain in SETTINGS.items()},
    "tune-debian": _tuning("debian", PLACES["debian"][1], (0.02, 0.05, 0.1, 0.2), (5e-4, 2e-3, 5e-3, 1e-2)),
    **{key: found for name, plain in SETTINGS.items() for key, found in _lengths(name, plain).items()},
    **_data(),
    **_noise(),
    "controls-kanji": _controls(),
    "peers-kanji-grids": peers.tuning("kanji", KANJI),
    **{f"pays-{name}": _pays(title, plain) for name, (title, plain) in PLACES.items()},
}
