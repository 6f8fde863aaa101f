"""Wide ResNets (Zagoruyko and Komodakis 2016): batch norm and ReLU come before each convolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions; where the shape changes, the shortcut is a 1x1 convolution of the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        residual = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A stem of 16 channels and three stages of 16, 32 and 64 times the factor, no dropout.

    Args:
        depth: number of convolutions, 6n + 4 for n blocks a stage.
        factor: what widens the stages.
        classes: number of logits.
        channels: of the images.
    """

    def __init__(self, depth: int, factor: int, classes: int, channels: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        stages, inputs = [], 16
        for width, stride in ((16 * factor, 1), (32 * factor, 2), (64 * factor, 2)):
            stages.append(
                nn.Sequential(Block(inputs, width, stride), *(Block(width, width, 1) for _ in range(blocks - 1)))
            )
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.stages(self.conv1(x)))).mean((2, 3)))


def wide_resnet(depth: int, factor: int, classes: int, shape: tuple[int, int, int]) -> WideResNet:
    """Build WRN-depth-factor."""
    return WideResNet(depth, factor, classes, shape[0])
