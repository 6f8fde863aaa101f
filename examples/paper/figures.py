"""The paper's Figures 2, 3, 5 and 6, and how the logits spread: runs trained once more, looked at after every epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dcl_optim import metrics
from dcl_optim.plots import training_curves
from examples.helpers.checkpoint import save_atomically
from examples.paper import measures, records
from examples.paper.bars import perplexity_bars, top_non_target_histogram
from examples.paper.configuration import Configuration, Experiment
from examples.paper.embeddings import class_embedding, logit_embedding
from examples.paper.plots import spread_curves
from examples.paper.trainer import Run, load_data

STAGES = {"early": 0.1, "middle": 0.5, "end": 1.0}  # shares of the training
DRIFTING, CLUSTERED = 50, 1000  # images in the t-SNE of two epochs, as in the paper, and in that of the classes


@dataclass
class Watched:
    """What a run has shown.

    Attributes:
        accuracy: after each epoch, of the model on the experiment's part of the data.
        consistency: after each epoch, of the top non-target classes on the training part.
        drift: d, how far the logits of the experiment's part moved in each epoch; that of the first is missing.
        spread: :func:`~examples.paper.measures.spread` of the experiment's part after each epoch, by the measure.
        kept: the logits of that part after the epochs that the figures show, by the epoch, from 1 on.
        labels: of that part.
        train: logits and labels of the training part at the end.
    """

    accuracy: list[float] = field(default_factory=list)
    consistency: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    spread: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    train: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))

    def history(self) -> dict[str, list[float]]:
        """The figures by epoch, as JSON takes them."""
        return {"accuracy": self.accuracy, "consistency": self.consistency, "drift": self.drift, **self.spread}


def stages(epochs: int) -> dict[str, int]:
    """The epoch, from 2 on, that each stage of the training is shown at, next to the epoch before it."""
    return {name: max(2, round(share * epochs)) for name, share in STAGES.items()}


def watch(run: Run, part: str) -> Watched:
    """Train a run to its end and look at it after every epoch."""
    seen, before = Watched(), None
    shown = {epoch for stage in stages(run.configuration.epochs).values() for epoch in (stage - 1, stage)}
    for epoch in range(1, run.configuration.epochs + 1):
        run.train_epoch()
        _, z, seen.labels = next(run.logits(part))
        _, *seen.train = next(run.logits("train"))
        seen.accuracy.append(float((z.argmax(1) == seen.labels).float().mean()))
        seen.consistency.append(float(metrics.top_non_target_consistency(*seen.train).nanmean()))
        for measure, value in measures.spread(z, seen.labels).items():
            seen.spread.setdefault(measure, []).append(value)
        if before is not None:
            seen.drift.append(float(metrics.logit_drift(before, z)))
        if epoch in shown:
            seen.kept[epoch] = z
        before = z
    return seen


def draw(title: str, part: str, names: Sequence[str], found: Mapping[str, Sequence[Watched]], start: str) -> list[Path]:
    """Draw all figures; those of single runs show the first seed's.

    Args:
        title: of the curves.
        part: of the data that the accuracy is of.
        names: of the classes.
        found: for each label its runs.
        start: of the files' paths, before what each figure shows.
    """
    first = {label: runs[0] for label, runs in found.items()}
    some = next(iter(first.values()))
    at, labels, generator = stages(len(some.accuracy)), some.labels, torch.Generator().manual_seed(0)
    few, many = (torch.randperm(len(labels), generator=generator)[:count] for count in (DRIFTING, CLUSTERED))
    last = {label: run.kept[at["end"]] for label, run in first.items()}
    train, hardest = {label: run.train[0] for label, run in first.items()}, most_errors(last, labels)

    def panels(offset: int) -> dict[str, Tensor]:
        return {
            f"{label}, epoch {epoch}": run.kept[epoch + offset][few]
            for label, run in first.items()
            for epoch in at.values()
        }

    histories = {label: [run.history() for run in runs] for label, runs in found.items()}
    epochs = ("the epoch before", "the epoch named")
    figures = {
        "curves": training_curves(histories, title=title, split=part),
        "spread": spread_curves(histories, f"Logits of {part} images: {title}"),
        "perplexity": perplexity_bars(train, some.train[1], names),
        "top-non-target": top_non_target_histogram(train, some.train[1], hardest, names),
        "drift": logit_embedding(panels(-1), panels(0), labels[few], names, epochs=epochs),
        "classes": class_embedding({k: z[many] for k, z in last.items()}, labels[many], names),
    }
    paths = [Path(f"{start}-{what}.png") for what in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path)
    return paths


def most_errors(logits: Mapping[str, Tensor], labels: Tensor) -> int:
    """The class that all methods together get wrong most often."""
    wrong = sum((z.argmax(1) != labels).long() for z in logits.values())
    return int(torch.zeros(int(labels.max()) + 1, dtype=torch.long).index_add(0, labels, wrong).argmax())


def watched(configuration: Configuration, seed: int, part: str, device: str, folder: Path) -> Watched:
    """Watch a run, or read what the folder keeps of it from before: figures can be drawn again at no cost."""
    path = folder / f"figures-{configuration.key(seed)}-{part}.pt"
    if not path.exists():
        save_atomically(asdict(watch(Run(configuration, seed, torch.device(device)), part)), path)
    return Watched(**torch.load(path, weights_only=True))


@dataclass(frozen=True)
class Folders:
    """Where things go: the JSON file, the figures, and what the watched runs have shown."""

    results: Path
    images: Path
    checkpoints: Path


def make(
    name: str, experiment: Experiment, labels: Sequence[str], seeds: int, device: str, folders: Folders
) -> list[Path]:
    """Train the runs, write what they showed by epoch to ``figures-<name>.json``, and draw.

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
    written = {"experiment": name, "part": experiment.part} | records.circumstances(device, torch.get_num_threads())
    written["runs"] = {label: [run.history() for run in runs] for label, runs in found.items()}
    (results / f"figures-{name}.json").write_text(json.dumps(written, indent=1) + "\n")
    names = load_data(experiment.runs[labels[0]]).class_names
    return draw(experiment.title, experiment.part, names, found, str(images / name))
