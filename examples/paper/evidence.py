"""Where the regularisers pay: long trainings, other methods, noise and controls, on data that no default was chosen on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.paper.configuration import Configuration, Experiment

# 4,000 steps each: of these sizes an epoch has 25 and 250.
KANJI = Configuration("kanji-fonts", "strided-cnn", "plain", 160, train_size=800, batch_size=32, averages=(0.99, 0.999))
SCRIPTS = replace(KANJI, data="noto-scripts", network="small-cnn", epochs=16, train_size=8_000)
SETTINGS = {"kanji": KANJI, "scripts": SCRIPTS}

RATES = (0.03, 0.1, 0.3)
DECAYS = (1e-4, 5e-4, 2e-3)


def _tuned(plain: Configuration) -> dict[str, Configuration]:
    return {
        f"lr {lr:g}, weight decay {decay:g}": replace(plain, lr=lr, weight_decay=decay)
        for lr in RATES
        for decay in DECAYS
    }


def _tuning() -> dict[str, Experiment]:
    return {
        f"tune-{name}": Experiment(
            f"learning rate and weight decay of plain training on {plain.data}, 4,000 steps",
            "validation",
            2,
            "lr 0.1, weight decay 0.0005",
            _tuned(plain),
        )
        for name, plain in SETTINGS.items()
    }


EXPERIMENTS: dict[str, Experiment] = _tuning()
