"""Where DCP may lose: tables of two to ten classes, few of whose rows are images, and classes that overlap.

Fixed before the runs. Five tables, each with five rows of each class, which the seed draws, and with half of all its
rows, which are the same in all seeds. An MLP without batch norm, SGD with momentum 0.9 and a cosine schedule, about 400
and 1,000 steps. The learning rate is the best of three for plain training by the accuracy on validation rows, in the
seeds 0 to 2 (``RATES``, run first), and is that of all methods. The others have the values that they have elsewhere:
DCP and DCL their defaults, label smoothing 0.1, and of the rivals the two that are best with one value for all
settings, CS-KD 1 and center loss 0.004. Ten new seeds, accuracy on test rows.

The question is what DCP's default gains over plain training in each of the ten settings. It counts as shown at p < 0.01
of the paired t-test, with Holm's correction over all cells of the table. ``weight=1``, which the pages name for few
classes, has a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from examples.research import gain_tables, records
from examples.research.configuration import DCP, Configuration, Experiment
from examples.research.gains import Row
from examples.research.records import Record
from examples.research.rivals.values import METHODS
from examples.research.table import accuracy, by_label
from examples.research.wrong_labels import DCL, RATES, label_of

FEW = 5  # rows of each class
# The title, and how many epochs with five rows of each class and with half of all rows.
DATA: dict[str, tuple[str, int, int]] = {
    "breast-cancer": ("breast cancer, 2 classes", 400, 110),
    "wine": ("wine, 3 classes", 400, 330),
    "iris": ("iris, 3 classes", 400, 330),
    "gaussians": ("overlapping Gaussians, 5 classes", 200, 13),
    "digits-table": ("digits as a table, 10 classes", 100, 35),
}
CHOICE_SEEDS = 3
SEEDS = 10
FIRST_SEED = 100


def _settings() -> dict[str, tuple[str, Configuration]]:
    """The title of each setting and its plain training, by the name of its experiment."""
    found = {}
    for data, (title, few_epochs, epochs) in DATA.items():
        few = Configuration(data, "mlp-without-norm", "plain", few_epochs, batch_size=16, shots=FEW)
        found[f"tables-{data}-{FEW}"] = f"{title}, {FEW} rows of each", few
        half = replace(few, epochs=epochs, batch_size=32, shots=None)
        found[f"tables-{data}-half"] = f"{title}, half of the rows", half
    return found


SETTINGS = _settings()
# Of the learning rate 0.1, what the runs of the choice have shown.
CHOSEN: dict[str, float] = {
    "tables-breast-cancer-5": 0.1,
    "tables-breast-cancer-half": 1 / 3,
    "tables-wine-5": 0.1,
    "tables-wine-half": 1.0,
    "tables-iris-5": 1.0,
    "tables-iris-half": 1.0,
    "tables-gaussians-5": 1 / 3,
    "tables-gaussians-half": 0.1,
    "tables-digits-table-5": 0.1,
    "tables-digits-table-half": 1.0,
}


def _rows(plain: Configuration) -> dict[str, Configuration]:
    return {
        "CE": plain,
        "DCP": replace(plain, method="dcp", options=DCP),
        "DCP, λ = 1": replace(plain, method="dcp", options=DCP | {"weight": 1.0}),
        "DCL": replace(plain, method="dcl", options=DCL),
        "label smoothing 0.1": METHODS["label smoothing"]["0.1"](plain),
        "CS-KD 1": METHODS["CS-KD"]["1"](plain),
        "center loss 0.004": METHODS["center loss"]["0.004"](plain),
    }


def choice_of(name: str) -> str:
    """The experiment that chooses a setting's learning rate."""
    return f"{name}-rates"


def _experiments() -> dict[str, Experiment]:
    found = {}
    for name, (title, plain) in SETTINGS.items():
        rates = {label_of("CE", rate): replace(plain, lr=rate * plain.lr) for rate in RATES}
        question = f"the learning rate of plain training: {title}"
        found[choice_of(name)] = Experiment(question, "validation", CHOICE_SEEDS, label_of("CE", RATES[0]), rates)
        tuned = replace(plain, lr=CHOSEN[name] * plain.lr)
        found[name] = Experiment(f"DCP on a table: {title}", "both", SEEDS, "CE", _rows(tuned), FIRST_SEED)
    return found


EXPERIMENTS = _experiments()


def best_rate(made: Sequence[Record]) -> float:
    """The rate with the best mean accuracy in the runs of a choice; of equal ones the larger."""
    found = by_label(made)
    return max(RATES, key=lambda rate: (fmean(map(accuracy, found[label_of("CE", rate)].values())), rate))


def table(folder: Path) -> str:
    """The gains over plain training in all settings, those that are shown in bold."""
    found = {title: records.read(folder / f"{name}.jsonl") for name, (title, _) in SETTINGS.items()}
    rows = {label: Row(label) for label in EXPERIMENTS[next(iter(SETTINGS))].runs if label != "CE"}
    return gain_tables.by_setting(found, rows, bold=True)
