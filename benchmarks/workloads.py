"""What is timed on what: a network, its input and its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.networks import CLASSES

BATCHES = 4  # distinct ones: a network that has learned one batch by heart makes gradients no training would

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Workload:
    """A network, the shape of one input and how many make a batch.

    Attributes:
        title: what the tables call it.
        build: makes the network.
        shape: one input.
        batch_size: inputs a step.
        classes: the number of its logits.
        package: the optional package it is built with.
        labels: the shape of the labels of one input: () for one label, (height, width) for one a pixel.
        flattened: whether the labels of a batch have one dimension, as those of a language model.
    """

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    classes: int = CLASSES
    package: str = ""
    labels: tuple[int, ...] = ()
    flattened: bool = False

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The same initial weights for the same seed, so that every method starts alike."""
        torch.manual_seed(seed)
        return self.build().to(dtype).train()

    def batches(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batches:
        """Noise with random labels: the time of a step does not depend on what is in the images."""
        generator = torch.Generator().manual_seed(seed)
        return [
            (
                torch.randn(self.batch_size, *self.shape, generator=generator, dtype=dtype),
                self._labels(generator),
            )
            for _ in range(BATCHES)
        ]

    def _labels(self, generator: torch.Generator) -> Tensor:
        y = torch.randint(self.classes, (self.batch_size, *self.labels), generator=generator)
        return y.flatten() if self.flattened else y


def _image(title: str, build: Callable[[], nn.Module], side: int, batch: int, classes: int = CLASSES) -> Workload:
    return Workload(title, build, (3, side, side), batch, classes, package="torchvision")


_resnet18 = partial(_image, "ResNet-18 32x32", networks.resnet_cifar, 32)


def _mlp(*sizes: int) -> Workload:
    title = f"MLP {'-'.join(map(str, sizes))}"
    return Workload(title, partial(networks.perceptron, sizes), (sizes[0],), 128)


ON_CPU = {
    "mlp-small": _mlp(64, 256, 256, CLASSES),
    "mlp": _mlp(784, 512, 512, CLASSES),
    "cnn": Workload("CNN 28x28", networks.cnn, (1, 28, 28), 128),
    "resnet18": _resnet18(32),
    "shufflenet": _image("ShuffleNetV2 64x64", networks.shufflenet, 64, 64),
    "vit": _image("ViT-Tiny, 6 layers, 32x32", networks.vit_tiny, 32, 64),
    "pixels": Workload("21 classes a pixel, 64x64", networks.segmentation, (3, 64, 64), 4, 21, labels=(64, 64)),
    "tokens": Workload(
        "8,000 classes a token, 64 tokens", networks.language_model, (64, 128), 8, 8_000, labels=(64,), flattened=True
    ),
}
ON_CUDA = {
    "resnet18-128": _resnet18(128),
    "resnet18-512": _resnet18(512),
    "resnet50": _image("ResNet-50 224x224", networks.resnet50, 224, 128, classes=1000),
    "vit-b16": _image("ViT-B/16 224x224", networks.vit_b16, 224, 128, classes=1000),
}
WORKLOADS = ON_CPU | ON_CUDA
