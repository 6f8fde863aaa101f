"""The paper's networks, for images of any number of channels, and an MLP: :func:`build` makes one by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from examples.research.networks import residual, small, strided, transformer, vision, wide
from examples.research.networks.weights import load

Shape = tuple[int, int, int]

SMALLEST = 4  # pixels a side, below which the cnn's pooling has nothing to pool
# Networks whose stem keeps the size of small images; at ImageNet's size that is an order of magnitude more work.
FOR_SMALL = (*residual.WIDTHS, "resnet10-l-strided", "wrn-28-10", "wrn-28-2")
WIDTH = 128  # of the hidden layers of both mlp, which take inputs of any size


def _cnn(classes: int, shape: Shape) -> nn.Module:
    return small.cnn(classes, shape[0])


def _small_cnn(classes: int, shape: Shape) -> nn.Module:
    return small.small_cnn(classes, shape[0])


def _mlp(classes: int, shape: Shape) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, classes),
    )


def _mlp_without_norm(classes: int, shape: Shape) -> nn.Module:
    """The same without batch norm, whose statistics of ten rows are noise."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(shape), WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, classes),
    )


def _without_norm(classes: int, shape: Shape) -> nn.Module:
    """Two convolutions and two linear layers, without batch norm."""
    channels, height, width = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU(), nn.Linear(64, classes)),
    )


_NETWORKS: dict[str, Callable[[int, Shape], nn.Module]] = {
    "cnn": _cnn,
    "small-cnn": _small_cnn,
    "strided-cnn": strided.strided_cnn,
    **{name: partial(vision.resnet, name) for name in ("resnet18", "resnet34", "resnet50")},
    **{name: partial(residual.resnet, name) for name in residual.WIDTHS},
    "resnet10-l-strided": partial(residual.resnet, "resnet10-l", stride=2),  # 3.6 times as fast on one CPU core
    "wrn-28-10": partial(wide.wide_resnet, 28, 10),
    "wrn-28-2": partial(wide.wide_resnet, 28, 2),
    "shufflenetv2": vision.shufflenet,
    "efficientnet-b0": vision.efficientnet,
    "efficientnet-lite0": vision.efficientnet_lite,
    "vit-tiny": transformer.vit_tiny,
    "swin-tiny": transformer.swin_tiny,
    "mlp": _mlp,
    "mlp-without-norm": _mlp_without_norm,
    "cnn-without-norm": _without_norm,
}
NAMES = tuple(_NETWORKS)


def build(name: str, classes: int, shape: Shape, weights: Path | None = None) -> nn.Module:
    """Build a network; its random weights come from torch's global generator.

    Args:
        name: one of NAMES.
        classes: number of logits, at least 2.
        shape: channels, height and width of one image; from 1x4x4 on, for both mlp from 1x1x1 on.
        weights: file with a state dict of this network, by ``torch.save``. A head of another number of classes is
            left out, so the new head stays random.

    Raises:
        ValueError: an unknown name, a number or shape that the network cannot take, or weights that do not fit.
    """
    if name not in _NETWORKS:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(NAMES)}")
    if classes < 2:
        raise ValueError(f"classes is {classes}; it must be at least 2")
    least = 1 if name in ("mlp", "mlp-without-norm") else SMALLEST
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < least:
        raise ValueError(
            f"shape is {tuple(shape)}; it must be (channels, height, width), at least (1, {least}, {least})"
        )
    if name in FOR_SMALL and min(shape[1:]) >= vision.LARGE:
        raise ValueError(
            f"name is {name!r}, whose stem is for images below {vision.LARGE} pixels; for {shape[1]}x{shape[2]} choose "
            "resnet18, resnet34, resnet50 or shufflenetv2, which are ImageNet's own there"
        )
    model = _NETWORKS[name](classes, shape)
    if weights is not None:
        load(model, weights)
    return model
