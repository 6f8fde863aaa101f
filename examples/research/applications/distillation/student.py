"""What ReviewKD and SimKD put on the student."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.research.applications.distillation.stages import Frozen, Output, Staged, shapes
from examples.research.networks import Shape

WIDEST = 512  # channels in which ReviewKD fuses


def _convolution(inputs: int, outputs: int, size: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)


class Fusion(nn.Module):
    """ReviewKD's attention based fusion (ABF) of a student's map with what came of the deeper ones.

    Source: Chen et al., Distilling Knowledge via Knowledge Review, CVPR 2021, Figure 3(a).

    Args:
        inputs: channels of the student's map.
        middle: channels in which the two are fused.
        target: channels, height and width of the teacher's map.
        deepest: whether there is no deeper one.
    """

    def __init__(self, inputs: int, middle: int, target: torch.Size, deepest: bool) -> None:
        super().__init__()
        self.size = tuple(target[1:])
        inward, outward = _convolution(inputs, middle, 1), _convolution(middle, target[0], 3)
        for convolution in (inward, outward):
            nn.init.kaiming_uniform_(convolution.weight, a=1)
        self.inward = nn.Sequential(inward, nn.BatchNorm2d(middle))
        self.outward = nn.Sequential(outward, nn.BatchNorm2d(target[0]))
        self.attention = None if deepest else nn.Sequential(nn.Conv2d(2 * middle, 2, 1), nn.Sigmoid())

    def forward(self, x: Tensor, deeper: Tensor | None) -> tuple[Tensor, Tensor]:
        """Give the map that is compared to the teacher's, and the fused one for the next shallower fusion."""
        x = self.inward(x)
        if self.attention is not None and deeper is not None:
            deeper = F.interpolate(deeper, size=x.shape[2:])
            shares = self.attention(torch.cat([x, deeper], 1))
            x = x * shares[:, :1] + deeper * shares[:, 1:]
        x = F.interpolate(x, size=self.size)
        return self.outward(x), x


class Review(nn.Module):
    """ReviewKD's way from the deepest map to the shallowest; trained beside the student and then thrown away.

    Args:
        ours: shapes of the student's maps, the pooled one last.
        theirs: those of the teacher's.

    Raises:
        ValueError: student and teacher have different numbers of stages.
    """

    def __init__(self, ours: list[torch.Size], theirs: list[torch.Size]) -> None:
        super().__init__()
        if len(ours) != len(theirs):
            raise ValueError(
                f"student has {len(ours) - 1} stages and teacher {len(theirs) - 1}; ReviewKD needs as many"
            )
        middle = min(WIDEST, ours[-1][0])
        pairs = enumerate(zip(ours, theirs, strict=True), 1)
        self.fusions = nn.ModuleList(Fusion(own[0], middle, other, i == len(ours)) for i, (own, other) in pairs)

    def forward(self, output: Output) -> list[Tensor]:
        """Give the maps that are compared to the teacher's, the pooled one last."""
        fused, found = None, []
        maps = (*map(F.relu, output.maps), output.pooled)
        for fusion, x in zip(reversed(self.fusions), reversed(maps), strict=True):
            compared, fused = fusion(x, fused)
            found.append(compared)
        return found[::-1]


class ReusedClassifier(nn.Module):
    """SimKD's network: the student's stages, a projector to the teacher's last map, the teacher's classifier, frozen.

    Its only map is the projected one. The projector is deployed, too; the student's own classifier is gone.

    Source: Chen et al., Knowledge Distillation with the Reused Teacher Classifier, CVPR 2022, Figure 2, with its code's
    projector of half the teacher's channels.

    Args:
        student: gives its stages.
        teacher: gives its pooling and classifier.
        shape: of the images.
    """

    def __init__(self, student: Staged, teacher: Staged, shape: Shape) -> None:
        super().__init__()
        (inputs, height, width), (outputs, *size) = shapes(student, shape)[-2], shapes(teacher, shape)[-2]
        self.size = (min(height, size[0]), min(width, size[1]))
        self.stages = student.stages
        middle = outputs // 2
        self.projector = nn.Sequential(
            *(_convolution(inputs, middle, 1), nn.BatchNorm2d(middle), nn.ReLU(inplace=True)),
            *(_convolution(middle, middle, 3), nn.BatchNorm2d(middle), nn.ReLU(inplace=True)),
            *(_convolution(middle, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
        )
        self.pool, self.classifier = Frozen(teacher.pool), Frozen(teacher.classifier)

    def forward(self, x: Tensor) -> Output:
        for stage in self.stages:
            x = stage(x)
        projected = self.projector(F.adaptive_avg_pool2d(F.relu(x), self.size))
        pooled = self.pool(projected)
        return Output(self.classifier(pooled), (projected,), pooled)
