"""The gains of DCP and DCL in twelve settings, for one table and one plot.

Learning rate and weight decay come from grids on validation data of plain training, two seeds, as in
:mod:`examples.research.evidence`: one grid for each data set and optimizer, also for its other settings.
Fashion-MNIST was not tuned.
"""

from __future__ import annotations

from dataclasses import replace

from examples.research.configuration import Configuration, Experiment
from examples.research.evidence import KANJI, SCRIPTS, TITLES, compared
from examples.research.gains import Row

FASHION = Configuration("fashion-mnist", "small-cnn", "plain", 50, train_size=5_000, averages=(0.99, 0.999))
DEBIAN = Configuration("debian-sections", "mlp", "plain", 20, batch_size=64, lr=0.05, weight_decay=5e-3)
DIGITS = Configuration("digits", "small-cnn", "plain", epochs=100, batch_size=32, lr=0.05)
KANJI_ADAMW = replace(KANJI, optimizer="adamw", lr=1e-2, weight_decay=1e-1)
DEBIAN_ADAMW = replace(DEBIAN, optimizer="adamw", lr=1e-3, weight_decay=1e-2)
CHARACTERS = f"{TITLES['kanji']}, 5 images per class"
TEXT = "40 categories of software, from a line of text"

PLACES: dict[str, tuple[str, Configuration]] = {
    "fashion-5k": ("Fashion-MNIST: 10 kinds of clothes, 5,000 images", FASHION),
    "fashion-50k": ("Fashion-MNIST: 10 kinds of clothes, 50,000 images", replace(FASHION, train_size=None, epochs=10)),
    "kanji": (f"{CHARACTERS}, 16,000 steps", replace(KANJI, epochs=640)),
    "kanji-adamw": (f"{CHARACTERS}, AdamW", KANJI_ADAMW),
    "scripts": (f"{TITLES['scripts']}, 16,000 steps", replace(SCRIPTS, epochs=64)),
    "debian": (TEXT, DEBIAN),
    "debian-adamw": (f"{TEXT}, AdamW", DEBIAN_ADAMW),
}
# The experiments of the table, by their name.
PAYS = {
    "data-kanji-480": f"{TITLES['kanji']}, 3 images per class",
    "length-kanji-4k": CHARACTERS,
    "noise-kanji-20": f"{CHARACTERS}, a fifth of the labels wrong",
    "length-kanji-1k": f"{CHARACTERS}, 1,000 steps",
    "length-scripts-4k": TITLES["scripts"],
    **{f"pays-{name}": title for name, (title, _) in PLACES.items()},
}
# Those of the plot: at most two of one data set.
DRAWN = ("length-kanji-4k", "noise-kanji-20", "pays-debian", "length-scripts-4k", "pays-fashion-5k", "pays-fashion-50k")
FOREST = {"DCP": Row("DCP"), "label smoothing": Row("label smoothing 0.1"), "DCL": Row("DCL")}
TESTED = {label: Row(label) for label in ("DCP", "label smoothing 0.1", "DCL")}
WEIGHTS = {label: Row(label) for label in ("DCP", "DCP, λ = 0.1", "DCP, λ = 1, α = 0.6")}


def _among(plain: Configuration, *labels: str) -> dict[str, Configuration]:
    """Some of the rows that are compared."""
    return {label: run for label, run in compared(plain).items() if label in labels}


def _pays(title: str, plain: Configuration, seeds: int) -> Experiment:
    runs = _among(plain, "CE", "label smoothing 0.1", "DCL", "DCP", "DCP, λ = 0.1")
    return Experiment(f"CE, label smoothing, DCL and DCP: {title}", "test", seeds, "CE", runs)


EXPERIMENTS: dict[str, Experiment] = {
    # On the most images five seeds, for the time they take.
    **{
        f"pays-{name}": _pays(title, plain, seeds=5 if name == "fashion-50k" else 10)
        for name, (title, plain) in PLACES.items()
    },
}
