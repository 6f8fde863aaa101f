"""Does the gain of DCL and DCP grow with the size of the network? ResNet-10 in four sizes, on letters and on kanji.

The primary comparison is DCL with its default weight of 0.1 against plain training (CE): test accuracy, on writing
systems, with the networks m and l, paired by seed. A gain or loss counts as shown at p < .01 of the paired t-test after
Holm's correction over the rows that are reported. All other rows, and kanji, are secondary. This text is older than all
runs of this file. A first look at m on writing systems, with seeds 0 to 2 and by another script, is older than this
text; DCL was ahead of CE with all three seeds.

Each row has three seeds. If they do not decide the primary comparison, CE and DCL get more. Their number is committed
before these runs, and all seeds are reported.

Learning rate 0.1 and weight decay 5e-4 are fixed for all networks and rows; neither was tuned, for plain training
either. Of the weights of DCL and DCP, and of label smoothing, no value is chosen: each is a row. The network l has a
stem of stride 2, because a step at stride 1 takes 3.6 times as long on one core.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from examples.paper.configuration import DCL, DCP, PAPER, Configuration, Experiment
from examples.paper.evidence import TITLES

# With 100 classes: 28 k, 84 k, 320 k and 1.25 M parameters.
NETWORKS = {"xs": "resnet10-xs", "s": "resnet10-s", "m": "resnet10-m", "l": "resnet10-l-strided"}
# All training images: 16,444 and 4,800.
SETTINGS = {
    "scripts": Configuration("noto-scripts", "resnet10-m", "plain", epochs=25, batch_size=64),
    "kanji": Configuration("kanji-fonts", "resnet10-m", "plain", epochs=60, batch_size=64),
}


def compared(plain: Configuration) -> dict[str, Configuration]:
    """What is compared with each network; the last two cost as much as DCL."""

    def by(method: str, **options: Any) -> Configuration:
        return replace(plain, method=method, options=options)

    return {
        "CE": plain,
        "DCL": by("dcl", **DCL | {"distance": "mse"}),
        "DCP": by("dcp", **DCP),
        "DCL, λ = 1": by("dcl", **PAPER),  # the paper's weight, α and distance
        "DCP, λ = 1": by("dcp", **DCP | {"weight": 1.0}),
        "label smoothing 0.1": by("plain", label_smoothing=0.1),
        "label smoothing 0.2": by("plain", label_smoothing=0.2),
        "CE, twice the epochs": replace(plain, epochs=2 * plain.epochs),
        "voting, 2 networks": by("voting"),
    }


def _size(setting: str, network: str) -> Experiment:
    runs = compared(replace(SETTINGS[setting], network=network))
    return Experiment(f"CE, DCL, DCP and others with {network}: {TITLES[setting]}", "test", 3, "CE", runs)


EXPERIMENTS: dict[str, Experiment] = {
    f"size-{setting}-{size}": _size(setting, network) for setting in SETTINGS for size, network in NETWORKS.items()
}
