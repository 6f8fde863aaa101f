"""Two small convolutional networks."""

from __future__ import annotations

from torch import nn


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def cnn(classes: int, channels: int = 1) -> nn.Module:
    """Four convolutions with batch norm, for any size from 4x4 on."""
    return nn.Sequential(
        *(*_block(channels, 32), *_block(32, 32), nn.MaxPool2d(2)),
        *(*_block(32, 64), *_block(64, 64), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 4, classes)),
    )


def small_cnn(classes: int, channels: int = 1) -> nn.Module:
    """Three convolutions with batch norm, the first of stride 2: a tenth of the work of :func:`cnn`."""
    first = nn.Conv2d(channels, 16, 5, stride=2, padding=2, bias=False)
    return nn.Sequential(
        *(first, nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(*_block(16, 32), nn.MaxPool2d(2)),
        *(*_block(32, 64), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4, classes)),
    )
