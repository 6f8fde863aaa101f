"""What one training run is, as data: two runs of the same configuration and seed are the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.research.records import fingerprint

# The tables' rows "preset paper" have these, under the name they had when they were recorded.
PAPER: dict[str, Any] = {"weight": 1.0, "alpha": 0.6, "distance": "squared"}
BY_BATCH: dict[str, Any] = {"update": "batch"}  # the paper's prototypes
# Settings are written out: a run's must not change when a default does. DCL's default distance is the paper's as long
# as no row is farther from its companion than the distance is squared, which none of these runs was.
DCL: dict[str, Any] = PAPER | {"weight": 0.1}
DCP: dict[str, Any] = {"weight": "auto", "alpha": 0.97, "update": "rows", "distance": "mse"}
DCP_01: dict[str, Any] = PAPER | BY_BATCH | {"weight": 0.1, "alpha": 0.97}


@dataclass(frozen=True)
class Configuration:
    """One training run, but for its seed.

    Attributes:
        data: a name of :data:`examples.research.datasets.NAMES`.
        network: a name of :data:`examples.research.networks.NAMES`.
        method: a name of :data:`examples.research.methods.NAMES`.
        epochs: passes over the training part.
        options: the method's own; ``companion`` is the name of a network.
        train_size: train on so many images only; None: all.
        augmentation: a name of :data:`examples.research.augmentations.NAMES`; None: the data set's own.
        batch_size: images a step.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        lr: the learning rate at the start; it falls to 0 along a cosine, epoch by epoch.
        weight_decay: of the optimizer.
        averages: decays for one step of moving averages of the weights: predictors of their own beside the model.
        label_noise: the share of the training labels that are replaced by another class.
        precision: "float32", or "bfloat16" for autocast in the network's forward pass, also when it is measured.
        shots: train on so many images of each class, drawn by the run's seed, as the wrong labels then are too; None:
            the training images and wrong labels are the same for every seed.
        pretrained: fine-tune ImageNet's weights, with images that are enlarged to 64 pixels.
    """

    data: str
    network: str
    method: str
    epochs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    train_size: int | None = None
    augmentation: str | None = None
    batch_size: int = 128
    optimizer: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 5e-4
    averages: tuple[float, ...] = ()
    label_noise: float = 0.0
    precision: str = "float32"
    shots: int | None = None
    pretrained: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The configuration in types that JSON knows."""
        found = asdict(self) | {"averages": list(self.averages)}
        if self.shots is None:
            del found["shots"]  # as in the records that are older
        if not self.pretrained:
            del found["pretrained"]
        return found

    def key(self, seed: int) -> str:
        """A name for the run: it differs where anything differs."""
        return fingerprint(self.as_dict() | {"seed": seed})


@dataclass(frozen=True)
class Experiment:
    """Runs that are compared, the same seeds for each.

    Attributes:
        title: what it asks.
        part: what is measured at the end: "validation" for choices, "test" for what was chosen before, and "both" for
            the test part with the validation part's accuracy beside it, by which values are chosen.
        seeds: how many.
        baseline: the label that the others are compared to.
        runs: the configurations by their label in the table.
        first_seed: the others follow it.
    """

    title: str
    part: str
    seeds: int
    baseline: str
    runs: Mapping[str, Configuration]
    first_seed: int = 0
