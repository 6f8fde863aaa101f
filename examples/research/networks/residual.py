"""ResNets of any widths for small images: ResNet-10 and its reductions, and distillation's ResNet-8x4 and -32x4."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# Widths of the stem and of the stages, and blocks a stage. ResNet-10 -l to -xs are the companions of the paper's table
# of smaller companions, as the authors' code has them; the two x4 are those of the distillation literature.
WIDTHS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "resnet10": (64, (64, 128, 256, 512), 1),
    "resnet10-l": (32, (32, 64, 128, 256), 1),
    "resnet10-m": (16, (16, 32, 64, 128), 1),
    "resnet10-s": (8, (8, 16, 32, 64), 1),
    "resnet10-xs": (8, (8, 16, 16, 32), 1),
    "resnet8x4": (32, (64, 128, 256), 1),
    "resnet32x4": (32, (64, 128, 256), 5),
}


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """A basic block whose ReLU comes first: it takes and gives the sums that others call pre-activations.

    The network computes the same as with the ReLU last (He et al. 2016, Figure 5, left); only the cut between one block
    and the next is elsewhere, so that the maps before ReLU are at hand.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _convolution(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x)


class ResNet(nn.Module):
    """A stem, stages that halve the image from the second on, average pooling and the linear head ``fc``.

    Modules are named as torchvision and the distillation literature name theirs, so their weight files fit.

    Args:
        classes: number of logits.
        channels: of the images.
        stem: width of the first convolution.
        widths: of the stages.
        blocks: in each stage.
        stride: of the stem.
    """

    def __init__(
        self, classes: int, channels: int, stem: int, widths: tuple[int, ...], blocks: int, stride: int = 1
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, stem, 3, stride)
        self.bn1 = nn.BatchNorm2d(stem)
        self.stages = [f"layer{i + 1}" for i in range(len(widths))]
        inputs = stem
        for stage, width in zip(self.stages, widths, strict=True):
            first = Block(inputs, width, stride=1 if stage == "layer1" else 2)
            self.add_module(stage, nn.Sequential(first, *(Block(width, width, 1) for _ in range(blocks - 1))))
            inputs = width
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor, before_relu: bool = False) -> list[Tensor]:
        """Give the maps after the stem and after each stage; ``fc`` of the last one's mean over space are the logits.

        Args:
            x: images, (B, C, H, W).
            before_relu: whether to give the maps before their ReLU, which the head applies itself.
        """
        maps = [self.bn1(self.conv1(x))]
        for stage in self.stages:
            maps.append(self.get_submodule(stage)(maps[-1]))
        return maps if before_relu else [F.relu(each) for each in maps]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.features(x, before_relu=True)[-1]).mean((2, 3)))


def resnet(name: str, classes: int, shape: tuple[int, int, int], stride: int = 1) -> ResNet:
    """Build one of WIDTHS, whose stem has a stride."""
    stem, widths, blocks = WIDTHS[name]
    return ResNet(classes, shape[0], stem, widths, blocks, stride)
