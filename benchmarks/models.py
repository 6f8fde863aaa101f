"""The networks that are timed, each with the batch it is timed on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10
BATCHES = 4  # distinct ones: a network that has learned one batch by heart makes gradients no training would

Batches = list[tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    """784-512-512-10: so little arithmetic that the wrapper's own work shows most."""
    sizes = (784, 512, 512)
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], CLASSES))


def cnn() -> nn.Module:
    """Two convolutions with batch norm on 28x28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, CLASSES)),
    )


def resnet18() -> nn.Module:
    """ResNet-18 with the stem that papers use on CIFAR: a 3x3 convolution of stride 1 and no pooling."""
    from torchvision.models import resnet18 as build

    model = build(num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


@dataclass(frozen=True)
class Workload:
    """A network, the shape of one input and how many make a batch."""

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The same initial weights for the same seed, so that every method starts alike."""
        torch.manual_seed(seed)
        return self.build().to(dtype)

    def batches(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batches:
        """Noise with random labels: the time of a step does not depend on what is in the pictures."""
        generator = torch.Generator().manual_seed(seed)
        return [
            (
                torch.randn(self.batch_size, *self.shape, generator=generator, dtype=dtype),
                torch.randint(CLASSES, (self.batch_size,), generator=generator),
            )
            for _ in range(BATCHES)
        ]


WORKLOADS = {
    "mlp": Workload("MLP 784-512-512-10", mlp, (1, 28, 28), 128),
    "cnn": Workload("CNN 28x28", cnn, (1, 28, 28), 128),
    "resnet18": Workload("ResNet-18 32x32", resnet18, (3, 32, 32), 32),
}
