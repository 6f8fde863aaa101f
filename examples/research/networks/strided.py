"""The network of the long trainings on two CPU cores: a step of 32 images takes about four milliseconds."""

from __future__ import annotations

from torch import nn


def strided_cnn(classes: int, shape: tuple[int, int, int], width: int = 16) -> nn.Module:
    """Three convolutions of stride 2 with batch norm, of width, twice and four times as many channels; mean pooling."""

    def block(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *(*block(shape[0], width, 5), *block(width, 2 * width, 3), *block(2 * width, 4 * width, 3)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)),
    )
