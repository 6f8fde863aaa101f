"""Plain training and four ways of distillation: each a module that holds the networks and gives a batch's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.research.applications.distillation import losses
from examples.research.applications.distillation.stages import Frozen, Output, Staged, shapes
from examples.research.applications.distillation.student import ReusedClassifier, Review
from examples.research.networks import Shape

REVIEW_WEIGHT = 5.0  # the authors' for ResNet32x4 to ResNet8x4


class Plain(nn.Module):
    """Cross-entropy, and no teacher.

    Attributes:
        model: what is deployed, and what DCL wraps.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the deployed network's logits.

        Args:
            x: images.
            y: their labels.
            share: of the warm-up that is done, up to 1; it weighs what DKD and ReviewKD add to the cross-entropy.
        """
        z = self.model(x).logits
        return F.cross_entropy(z, y), z


class Distillation(Plain, ABC):
    """A student and its frozen teacher."""

    def __init__(self, model: nn.Module, teacher: Staged) -> None:
        super().__init__(model)
        self.teacher = Frozen(teacher)

    def forward(self, x: Tensor, y: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        output = self.model(x)
        return self.loss(output, taught, y, share), output.logits

    @abstractmethod
    def loss(self, output: Output, taught: Output, y: Tensor, share: float) -> Tensor:
        """The loss from what student and teacher give."""


class KD(Distillation):
    """Hinton et al. 2015: the teacher's softened probabilities are labels, too."""

    def loss(self, output: Output, taught: Output, y: Tensor, share: float) -> Tensor:
        return losses.distillation(output.logits, taught.logits, y)


class DKD(Distillation):
    """Zhao et al. 2022: the true class and the others apart."""

    def loss(self, output: Output, taught: Output, y: Tensor, share: float) -> Tensor:
        return F.cross_entropy(output.logits, y) + share * losses.decoupled(output.logits, taught.logits, y)


class ReviewKD(Distillation):
    """Chen et al. 2021: each of the student's maps, fused with its deeper ones, is held to the teacher's."""

    def __init__(self, student: Staged, teacher: Staged, shape: Shape) -> None:
        super().__init__(student, teacher)
        self.review = Review(shapes(student, shape), shapes(teacher, shape))

    def loss(self, output: Output, taught: Output, y: Tensor, share: float) -> Tensor:
        context = losses.hierarchical_context(self.review(output), (*taught.maps, taught.pooled))
        return F.cross_entropy(output.logits, y) + share * REVIEW_WEIGHT * context


class SimKD(Distillation):
    """Chen et al. 2022: the student's projected last map is held to the teacher's, whose classifier it then uses."""

    def __init__(self, student: Staged, teacher: Staged, shape: Shape) -> None:
        super().__init__(ReusedClassifier(student, teacher, shape), teacher)

    def loss(self, output: Output, taught: Output, y: Tensor, share: float) -> Tensor:
        (projected,) = output.maps
        height, width = projected.shape[2:]
        target = F.adaptive_avg_pool2d(F.relu(taught.maps[-1]), (height, width))
        return F.mse_loss(projected, target)  # the cross-entropy's weight is 0 in the authors' code


NAMES = ("plain", "KD", "ReviewKD", "SimKD", "DKD")


def make(name: str, student: Staged, teacher: Staged | None, shape: Shape) -> Plain:
    """Make a method by its name.

    Args:
        name: one of NAMES.
        student: the network to train.
        teacher: a trained one; it is frozen. None for ``plain``.
        shape: of the images.

    Raises:
        ValueError: an unknown name, no teacher where one is needed, or networks that the method cannot pair.
    """
    if name not in NAMES:
        raise ValueError(f"method={name!r} is unknown; choose one of {', '.join(NAMES)}")
    if name == "plain":
        return Plain(student)
    if teacher is None:
        raise ValueError(f"teacher=None: method={name!r} needs one; only 'plain' does without")
    if name in ("KD", "DKD"):
        return {"KD": KD, "DKD": DKD}[name](student, teacher)
    return {"ReviewKD": ReviewKD, "SimKD": SimKD}[name](student, teacher, shape)
