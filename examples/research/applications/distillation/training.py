"""The settings of a run, the loop that trains teacher and student, and the teacher's weights on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

from examples.research import datasets
from examples.research.applications.classification import moved, placed
from examples.research.applications.distillation import stages
from examples.research.applications.distillation.methods import Plain
from examples.research.applications.optimizers import penalty
from examples.research.checkpoint import save_atomically
from examples.research.datasets import Data
from examples.research.networks.weights import load
from examples.research.records import fingerprint

FOLDER = Path("runs/distillation")  # of the teachers' weights
SHARED = ("data", "folder", "train_size", "augmentation", "batch_size", "lr", "weight_decay", "schedule")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What the command line can change.

    Attributes:
        data: one of :data:`examples.research.datasets.NAMES`.
        folder: where its files are; None: the data set's usual place.
        train_size: a stratified part of the training images; 0: all.
        augmentation: None: what is usual for the data set.
        teacher: one of :data:`examples.research.applications.distillation.stages.NAMES`.
        teacher_weights: file with its state dict; None: it is trained once, as the student is, and kept under runs/.
        teacher_epochs: of that training.
        student: like ``teacher``.
        epochs: of the student's training.
        batch_size: images a step.
        lr: SGD's learning rate at the start.
        weight_decay: SGD's.
        schedule: ``cosine`` to 0, or ``steps``: a tenth after 5/8, 3/4 and 7/8 of the epochs.
        warmup: epochs over which DKD's and ReviewKD's terms grow to their weights.
        weight: DCL's λ.
        alpha: DCL's α.
        part: what the accuracy is of: "test", or "validation" for choices.
    """

    data: str = "noto-scripts"
    folder: str | None = None
    train_size: int = 4_000
    augmentation: str | None = None
    teacher: str = "small-cnn"
    teacher_weights: str | None = None
    teacher_epochs: int = 30
    student: str = "small-cnn-half"
    epochs: int = 30
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup: int = 3
    weight: float = 0.1
    alpha: float = 0.6
    part: str = "test"


def load_data(settings: Settings) -> Data:
    """Load the images; the split is the same for all seeds, so that students learn from what the teacher saw."""
    return datasets.load(
        settings.data,
        folder=settings.folder,
        train_size=settings.train_size or None,
        augmentation=settings.augmentation,
    )


def sgd(method: Plain, settings: Settings) -> Optimizer:
    """SGD for all that the method trains: the student, and what is trained beside it."""
    trained = [p for p in method.parameters() if p.requires_grad]
    return SGD(trained, lr=settings.lr, momentum=0.9, weight_decay=settings.weight_decay)


def scheduled(optimizer: Optimizer, name: str, epochs: int) -> LRScheduler:
    """The learning rate's schedule by name; ValueError for an unknown one."""
    if name == "cosine":
        return CosineAnnealingLR(optimizer, epochs)
    if name == "steps":
        return MultiStepLR(optimizer, [round(share * epochs) for share in (5 / 8, 3 / 4, 7 / 8)])
    raise ValueError(f"schedule={name!r} is unknown; choose one of cosine, steps")


def fit(
    method: Plain, optimizer: Optimizer, data: Data, settings: Settings, epochs: int, seed: int, progress: Progress
) -> None:
    """Train; the seed decides on the batches, their augmentation and dropout."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    device = next(method.parameters()).device
    scheduler = scheduled(optimizer, settings.schedule, epochs)
    for epoch in range(1, epochs + 1):
        method.train()
        share = min(1.0, epoch / max(1, settings.warmup))
        for x, y, _ in data.epoch(settings.batch_size, generator):
            optimizer.zero_grad()
            loss, z = method(moved(x, device), y.to(device), share)
            (loss + penalty(optimizer, z)).backward()
            optimizer.step()
        scheduler.step()
        progress(f"epoch {epoch} of {epochs}, loss {loss.item():.3f}")


def teacher(settings: Settings, data: Data, device: torch.device, progress: Progress) -> stages.Staged:
    """The trained teacher: from the file of the settings, or from the one that this function wrote for such settings.

    Raises:
        ValueError: the network cannot be cut into stages, or the weights are not its own.
    """
    path = Path(settings.teacher_weights) if settings.teacher_weights else weights_file(settings)
    if settings.teacher_weights and not path.exists():
        raise ValueError(
            f"teacher_weights={settings.teacher_weights!r} does not exist; leave it out to train a teacher"
        )
    network = stages.build(settings.teacher, data.classes, data.shape)
    if not path.exists():
        _train_teacher(settings, data, device, lambda text: progress(f"teacher, {text}"))
    load(network, path, other_classes=False)
    return stages.cut(network)


def weights_file(settings: Settings) -> Path:
    """Where a teacher of these settings is kept: all that decides on its weights is in the name."""
    chosen = {name: value for name, value in asdict(settings).items() if name in SHARED or name == "teacher_epochs"}
    return FOLDER / f"{settings.data}-{settings.teacher}-{fingerprint(chosen)}.pt"


def _train_teacher(settings: Settings, data: Data, device: torch.device, progress: Progress) -> None:
    torch.manual_seed(0)
    network = stages.build(settings.teacher, data.classes, data.shape)
    method = Plain(stages.cut(network))
    placed(method, device)
    fit(method, sgd(method, settings), data, settings, settings.teacher_epochs, 0, progress)
    save_atomically(network.state_dict(), weights_file(settings))
