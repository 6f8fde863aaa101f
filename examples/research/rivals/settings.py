"""Where the methods are compared: fast settings, in which values are chosen, and expensive ones, which get them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from examples.research.configuration import Configuration
from examples.research.evidence import KANJI, SCRIPTS, TITLES
from examples.research.pays import DEBIAN, DIGITS, TEXT
from examples.research.size import SETTINGS

FONTS = TITLES["kanji"]


@dataclass(frozen=True)
class Place:
    """A setting.

    Attributes:
        title: what a table calls it.
        plain: training without any method.
        classes: how many the data have.
        seeds: how many a round has; the digits train in a second, and have few test images.
    """

    title: str
    plain: Configuration
    classes: int
    seeds: int = 1

    def of_round(self, number: int) -> range:
        """The seeds of a round."""
        return range(number * self.seeds, (number + 1) * self.seeds)


def _kanji(shots: int, epochs: int, noise: float = 0.0) -> Configuration:
    drawn = replace(KANJI, train_size=None, averages=(), shots=shots)
    return replace(drawn, epochs=epochs, label_noise=noise)


def _fashion(shots: int, epochs: int, noise: float = 0.0) -> Configuration:
    batch_size = 32 if shots <= 50 else 64
    drawn = Configuration("fashion-mnist", "strided-cnn", "plain", epochs, batch_size=batch_size)
    return replace(drawn, shots=shots, label_noise=noise)


# About 2,000 steps of 32 images; kanji 5 with and without wrong labels 4,000, as on the other pages; the digits 400 and
# 1,000. No learning rate was tuned for these settings before the runs: they are those of the other pages.
FAST: dict[str, Place] = {
    "kanji-3": Place(f"{FONTS}, 3 of each", _kanji(3, 133), 150),
    "kanji-5": Place(f"{FONTS}, 5 of each", _kanji(5, 160), 150),
    "kanji-5-noise-20": Place(f"{FONTS}, 5 of each, 20 % wrong", _kanji(5, 160, 0.2), 150),
    "kanji-5-noise-40": Place(f"{FONTS}, 5 of each, 40 % wrong", _kanji(5, 160, 0.4), 150),
    "kanji-32": Place(f"{FONTS}, all 32 of each", _kanji(32, 13), 150),
    "scripts": Place(
        f"{TITLES['scripts']}, 80 of each: cannot fit",
        replace(SCRIPTS, train_size=None, averages=(), shots=80, epochs=8),
        100,
    ),
    "text": Place(f"{TEXT}, up to 200 of each", replace(DEBIAN, shots=200), 40),
    "digits-5": Place("digits, 5 of each", replace(DIGITS, shots=5, epochs=200), 10, seeds=3),
    "digits-30-noise-30": Place(
        "digits, 30 of each, 30 % wrong", replace(DIGITS, shots=30, label_noise=0.3), 10, seeds=3
    ),
    "fashion-500-noise-30": Place("Fashion-MNIST, 500 images, 30 % wrong", _fashion(50, 125, 0.3), 10),
    "fashion-5000": Place("Fashion-MNIST, 5,000 images", _fashion(500, 20), 10),
}

_RESNET = replace(SETTINGS["kanji"], batch_size=32, epochs=160, shots=5, label_noise=0.2)
# EfficientNet-Lite0 as in examples/research/applications/fine_tuning.py: about 500 steps.
_LITE = Configuration(
    "kanji-fonts", "efficientnet-lite0", "plain", 40, batch_size=24, lr=0.03, shots=2, pretrained=True
)
EXPENSIVE: dict[str, Place] = {
    "resnet-kanji-5-noise-20": Place(f"ResNet-10, {FONTS}, 5 of each, 20 % wrong", _RESNET, 150),
    "lite-kanji-2": Place(f"EfficientNet-Lite0, {FONTS}, 2 of each", _LITE, 150),
    "lite-kanji-5-noise-20": Place(
        f"EfficientNet-Lite0, {FONTS}, 5 of each, 20 % wrong", replace(_LITE, shots=5, epochs=16, label_noise=0.2), 150
    ),
    "resnet-scripts": Place(f"ResNet-10, {TITLES['scripts']}", SETTINGS["scripts"], 100),
}
PLACES = FAST | EXPENSIVE

CHOICE_ROUNDS = (0, 1)
CHOSEN_ROUNDS = (9, 10, 11, 12, 13)  # of the chosen values
