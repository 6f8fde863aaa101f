"""Networks in pieces, so that the maps between them are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from examples.research import networks
from examples.research.networks.residual import WIDTHS, ResNet

NAMES = tuple(WIDTHS)


class Output(NamedTuple):
    """What a network in pieces gives; DCL finds the logits by their name.

    Attributes:
        logits: (B, K).
        maps: after each stage, before its ReLU, (B, C, H, W).
        pooled: the last map after its ReLU and pooling, what the classifier sees.
    """

    logits: Tensor
    maps: tuple[Tensor, ...]
    pooled: Tensor


class Staged(nn.Module):
    """A network in pieces.

    Args:
        stages: each of the later ones begins with the ReLU of the one before.
        pool: the last stage's ReLU, and pooling.
        classifier: from there to the logits.
    """

    def __init__(self, stages: Sequence[nn.Module], pool: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.stages, self.pool, self.classifier = nn.ModuleList(stages), pool, classifier

    def forward(self, x: Tensor) -> Output:
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        pooled = self.pool(x)
        return Output(self.classifier(pooled), tuple(maps), pooled)


class Frozen(nn.Module):
    """A network whose parameters are not trained and that stays in evaluation mode whatever is around it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Any:
        return self.network(x)


def build(name: str, classes: int, shape: networks.Shape) -> nn.Module:
    """Build one of NAMES, for :func:`cut`; ValueError for other names."""
    if name not in NAMES:
        raise ValueError(f"network={name!r} cannot be cut into stages; choose one of {', '.join(NAMES)}")
    return networks.build(name, classes, shape)


def cut(network: nn.Module) -> Staged:
    """Cut a network of :func:`build` into pieces; they are the network's own modules, so its state dict stays right."""
    assert isinstance(network, ResNet)
    layers = [network.get_submodule(stage) for stage in network.stages]
    first = nn.Sequential(network.conv1, network.bn1, layers[0])
    pool = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return Staged([first, *layers[1:]], pool, nn.Sequential(nn.Flatten(), network.fc))


def shapes(network: Staged, shape: networks.Shape) -> list[torch.Size]:
    """Channels, height and width of a network's maps, the pooled one last, for images of a shape."""
    training = network.training
    with torch.no_grad():
        output = network.eval()(next(network.parameters()).new_zeros(1, *shape))
    network.train(training)
    return [found.shape[1:] for found in (*output.maps, output.pooled)]
