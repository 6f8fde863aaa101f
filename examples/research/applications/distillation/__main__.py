"""Knowledge distillation (the paper's Table 5): KD, ReviewKD, SimKD and DKD, each without and with DCL.

By default a CNN of 49,000 weights teaches one of 19,000 the Noto scripts. The paper has ResNet32x4 teach ResNet8x4
CIFAR-100: ``python -m examples.paper distillation``. Without ``--teacher-weights``, a file of the teacher's state dict,
it is trained for ``--teacher-epochs``, once.
"""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer
from examples.research.applications import classification
from examples.research.applications.comparison import Application, Row, main
from examples.research.applications.distillation import methods, stages, training
from examples.research.applications.distillation.training import Progress, Settings
from examples.research.datasets import Data


def train(*, method: str, dcl: bool, seed: int, device: torch.device, progress: Progress, **options: Any) -> float:
    """Train a student and give its accuracy in per cent; the method ``teacher`` gives the teacher's.

    Args:
        method: ``teacher`` or one of :data:`methods.NAMES`.
        dcl: whether to train with DCL.
        seed: of the student's weights, the batches and their augmentation; the teacher is the same for all.
        device: where to train.
        progress: gets a text after each epoch.
        options: the fields of :class:`Settings`.
    """
    settings = Settings(**options)
    data = training.load_data(settings)
    teacher = None if method == "plain" else training.teacher(settings, data, device, progress)
    if method == "teacher" and teacher is not None:
        return score(classification.placed(teacher, device), data, device, settings.part)
    torch.manual_seed(seed)
    student = stages.cut(stages.build(settings.student, data.classes, data.shape))
    distilled = methods.make(method, student, teacher, data.shape)
    classification.placed(distilled, device)
    optimizer = training.sgd(distilled, settings)
    if dcl:
        optimizer = with_dcl(optimizer, distilled, settings)
    training.fit(distilled, optimizer, data, settings, settings.epochs, seed, progress)
    return score(distilled.model, data, device, settings.part)


def score(network: stages.Staged, data: Data, device: torch.device, part: str) -> float:
    """Accuracy in per cent of a network in pieces."""
    return classification.accuracy(network, data.fixed(part), device, logits=attrgetter("logits"))


def with_dcl(optimizer: Optimizer, method: methods.Plain, settings: Settings) -> DCLOptimizer:
    """Wrap the optimizer.

    DCL holds the deployed network to its companion; the teacher and what ReviewKD trains beside it have none. A factor
    on the loss cannot be read off the gradient of a distillation loss, so the penalty is a term of the loss.
    """
    return DCLOptimizer(optimizer, method.model, weight=settings.weight, alpha=settings.alpha)


def _rows() -> dict[str, Row]:
    rows = {"teacher": Row({"method": "teacher", "dcl": False})}
    for name in methods.NAMES:
        label = "student" if name == "plain" else name
        rows[label] = Row({"method": name, "dcl": False}, against=None if name == "plain" else "student")
        rows[f"{label}, DCL"] = Row({"method": name, "dcl": True}, against=label)
    return rows


BOUNDS = {"train_size": (0,), "warmup": (0,), "alpha": (0, 1)}
APPLICATION = Application("distillation", "accuracy, %", train, _rows(), asdict(Settings()), BOUNDS)

if __name__ == "__main__":
    main(APPLICATION, __doc__)
