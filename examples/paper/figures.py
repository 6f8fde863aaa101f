"""Curves over the epochs of accuracy, consistency and spread of the logits, of runs that are trained again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from dcl_optim import metrics
from dcl_optim.plots import training_curves
from examples.helpers.checkpoint import save_atomically
from examples.paper import measures, records
from examples.paper.configuration import Configuration, Experiment
from examples.paper.plots import spread_curves
from examples.paper.trainer import Run


@dataclass
class Watched:
    """The measurements of a run, by epoch.

    Attributes:
        accuracy: of the model on the experiment's part of the data.
        consistency: of the top non-target classes on the training part.
        drift: d, how far the logits of the experiment's part moved since the epoch before; the first epoch has none.
        spread: :func:`~examples.paper.measures.spread` of the experiment's part, by the measure.
    """

    accuracy: list[float] = field(default_factory=list)
    consistency: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    spread: dict[str, list[float]] = field(default_factory=dict)

    def history(self) -> dict[str, list[float]]:
        """Return the measurements as JSON takes them."""
        return {"accuracy": self.accuracy, "consistency": self.consistency, "drift": self.drift, **self.spread}


def watch(run: Run, part: str) -> Watched:
    """Train a run to its end and measure it after every epoch."""
    seen, before = Watched(), None
    for _ in range(run.configuration.epochs):
        run.train_epoch()
        _, z, labels = next(run.logits(part))
        _, *train = next(run.logits("train"))
        seen.accuracy.append(float((z.argmax(1) == labels).float().mean()))
        seen.consistency.append(float(metrics.top_non_target_consistency(*train).nanmean()))
        for measure, value in measures.spread(z, labels).items():
            seen.spread.setdefault(measure, []).append(value)
        if before is not None:
            seen.drift.append(float(metrics.logit_drift(before, z)))
        before = z
    return seen


def draw(
    experiment: Experiment, histories: Mapping[str, Sequence[Mapping[str, list[float]]]], start: str
) -> list[Path]:
    """Draw the curves and the spread.

    Args:
        experiment: names the figures and the part of the data.
        histories: for each label its runs.
        start: of the files' paths, before the name of each figure.
    """
    title, part = experiment.title, experiment.part
    figures = {
        "curves": training_curves(histories, title=title, split=part),
        "spread": spread_curves(histories, f"Logits of {part} images: {title}"),
    }
    paths = [Path(f"{start}-{what}.png") for what in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path)
    return paths


def watched(configuration: Configuration, seed: int, part: str, device: str, folder: Path) -> Watched:
    """Watch a run, or read its measurements from the folder if it has them: drawing again trains nothing."""
    path = folder / f"figures-{configuration.key(seed)}-{part}.pt"
    if not path.exists():
        save_atomically(asdict(watch(Run(configuration, seed, torch.device(device)), part)), path)
    return Watched(**torch.load(path, weights_only=True))


@dataclass(frozen=True)
class Folders:
    """The folders of the JSON file, the figures, and the measurements of single runs."""

    results: Path
    images: Path
    checkpoints: Path


def make(
    name: str, experiment: Experiment, labels: Sequence[str], seeds: int, device: str, folders: Folders
) -> list[Path]:
    """Train the runs, write their measurements to ``figures-<name>.json``, and draw.

    Args:
        name: the experiment's.
        experiment: whose runs are shown.
        labels: the rows.
        seeds: how many runs of each.
        device: where to train.
        folders: of all that is written.
    """
    results, images = folders.results, folders.images
    found: dict[str, list[Watched]] = {label: [] for label in labels}
    with tqdm(total=seeds * len(labels), desc=f"figures of {name}", unit="run") as bar:
        for seed in range(seeds):
            for label in labels:
                run = experiment.runs[label]
                found[label].append(watched(run, seed, experiment.part, device, folders.checkpoints))
                bar.update()
    results.mkdir(parents=True, exist_ok=True)
    images.mkdir(parents=True, exist_ok=True)
    histories = {label: [run.history() for run in runs] for label, runs in found.items()}
    about = {"experiment": name, "part": experiment.part} | records.circumstances(device, torch.get_num_threads())
    written = {**about, "runs": histories}
    (results / f"figures-{name}.json").write_text(json.dumps(written, indent=1) + "\n")
    return draw(experiment, histories, str(images / name))
