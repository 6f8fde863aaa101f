"""The paper's figures of CIFAR-100, drawn from what the runs left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.research.paper.rows import Row

CLASSES = 20  # of the perplexities
CLUSTERS = 10  # classes of the t-SNE
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def file(folder: Path, key: str, seed: int) -> Path:
    """Where a run leaves what it is drawn from."""
    return folder / f"{key}-{seed}.pt"


def draw(rows: Sequence[Row], made: Runs, folder: Path) -> list[Path]:
    """Draw the figures of rows without numbers; gives the files."""
    shown = [row for row in rows if row.paper is None and file(folder, row.work.key(0), 0).exists()]
    if not shown:
        return []
    from matplotlib import pyplot

    of_network = {row.column: row for row in shown if row.line == shown[0].line}
    loaded = {label: torch.load(file(folder, row.work.key(0), 0)) for label, row in of_network.items()}
    names = made[shown[0].work.key(0)][0]["class_names"]
    drawings = {
        "consistency": lambda axes: _consistency(axes, shown, made),
        "perplexity": lambda axes: _perplexity(axes, loaded, names),
        "non-targets": lambda axes: _non_targets(axes, loaded, names),
        "variation": lambda axes: _variation(axes, loaded),
        "trajectory": lambda axes: _trajectory(axes, of_network, made),
        "clusters": lambda axes: _clusters(axes, loaded),
    }
    paths = []
    for name, onto in drawings.items():
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        onto(axes)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
        pyplot.close(figure)
    return paths


def _consistency(axes: Any, shown: Sequence[Row], made: Runs) -> None:
    """Test accuracy by consistency on the training images (Figure 2)."""
    for row in shown:
        record = made[row.work.key(0)][0]
        accuracy = 100 * next(iter(record["accuracy"].values()))
        axes.scatter(record["consistency"], accuracy, label=f"{row.line}, {row.column}")
    axes.set(xlabel="top non-target consistency, training", ylabel="test accuracy, %")
    axes.legend(fontsize=7)


def _perplexities(counts: Tensor) -> Tensor:
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return torch.special.entr(shares).sum(1).exp()


def _perplexity(axes: Any, loaded: Mapping[str, Any], names: Sequence[str]) -> None:
    """Perplexity of random classes (Figure 3)."""
    chosen = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:CLASSES]
    for number, (label, run) in enumerate(loaded.items()):
        places = torch.arange(len(chosen)) + 0.4 * number
        axes.bar(places.tolist(), _perplexities(run["counts"])[chosen].tolist(), width=0.4, label=label)
    axes.set_xticks(range(len(chosen)), [names[k] for k in chosen.tolist()], rotation=90, fontsize=7)
    axes.set(ylabel="non-target perplexity")
    axes.legend()


def _non_targets(axes: Any, loaded: Mapping[str, Any], names: Sequence[str]) -> None:
    """How often each class is the leopard's top non-target (Figures 1 and 2c)."""
    target = names.index("leopard") if "leopard" in names else 0
    most = torch.stack([run["counts"][target] for run in loaded.values()]).sum(0).topk(min(8, len(names))).indices
    for number, (label, run) in enumerate(loaded.items()):
        counts = run["counts"][target].double()
        shares = (counts / counts.sum().clamp(min=1))[most]
        axes.bar((torch.arange(len(most)) + 0.4 * number).tolist(), shares.tolist(), width=0.4, label=label)
    axes.set_xticks(range(len(most)), [names[k] for k in most.tolist()], rotation=45)
    axes.set(ylabel=f"share as top non-target of {names[target]}")
    axes.legend()


def _variation(axes: Any, loaded: Mapping[str, Any]) -> None:
    """The mean distance of test logits between neighboring epochs (Figure 5, left)."""
    for label, run in loaded.items():
        distances = (run["watched"][1:] - run["watched"][:-1]).norm(dim=2).mean(1)
        axes.plot(range(2, 2 + len(distances)), distances.tolist(), label=label)
    axes.set(xlabel="epoch", ylabel="distance of logits to the epoch before")
    axes.legend()


def _trajectory(axes: Any, of_network: Mapping[str, Row], made: Runs) -> None:
    """The test accuracy by epoch (Figure 5, right)."""
    for label, row in of_network.items():
        history = [100 * value for value in made[row.work.key(0)][0]["history"]]
        axes.plot(range(1, 1 + len(history)), history, label=label)
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.legend()


def _clusters(axes: Any, loaded: Mapping[str, Any]) -> None:
    """t-SNE of the test logits of random classes, the second run to the right of the first (Figure 6)."""
    from sklearn.manifold import TSNE

    for number, run in enumerate(loaded.values()):
        classes = torch.randperm(run["test"].shape[1], generator=torch.Generator().manual_seed(0))[:CLUSTERS]
        kept = torch.isin(run["labels"], classes)
        points = run["test"][kept].numpy()
        places = TSNE(perplexity=min(30.0, max(1.0, (len(points) - 1) / 3)), random_state=0).fit_transform(points)
        places = (places - places.min(0)) / (places.max(0) - places.min(0) + 1e-9)
        axes.scatter(places[:, 0] + 1.2 * number, places[:, 1], c=run["labels"][kept].tolist(), cmap="tab10", s=6)
    axes.set(title=" | ".join(loaded), xticks=[], yticks=[])
