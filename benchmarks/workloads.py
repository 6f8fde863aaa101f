"""What is timed: networks, their batches, and where and how they run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

CLASSES = 10
BATCHES = 4  # distinct ones: a network that has learned one batch by heart makes gradients no training would
PRECISIONS = ("float32", "bf16-channels-last")

Batches = list[tuple[Tensor, Tensor]]


# ---- networks --------------------------------------------------------------------------------------------------------


def perceptron(sizes: Sequence[int]) -> nn.Module:
    """Linear layers of the given sizes, input first, with ReLU between them."""
    *hidden, (last, classes) = itertools.pairwise(sizes)
    layers = [layer for a, b in hidden for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(last, classes))


def cnn() -> nn.Module:
    """Two convolutions with batch norm on 28x28."""
    first, second = 16, 32
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3, padding=1, bias=False), nn.BatchNorm2d(second), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(second * 7 * 7, CLASSES)),
    )


def resnet_cifar() -> nn.Module:
    """ResNet-18 with the stem that papers use on CIFAR: 3x3, stride 1, no pooling."""
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [2] * 4, num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def torchvision_model(name: str, classes: int) -> nn.Module:
    """A network as torchvision has it."""
    from torchvision.models import get_model

    return get_model(name, num_classes=classes)


def vit_tiny() -> nn.Module:
    """Six layers of width 192 on 8x8 patches of 4x4 pixels."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=4, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=CLASSES
    )


def segmentation() -> nn.Module:
    """Three convolutions at full resolution, and 21 logits a pixel (N, K, H, W)."""
    sizes = itertools.pairwise((3, 32, 32, 32))
    blocks = [
        layer for a, b in sizes for layer in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.Conv2d(32, 21, 1))


def language_model() -> nn.Module:
    """Two transformer layers of width 128 over vectors of tokens, and 8,000 logits a token, as rows (tokens, K)."""
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers, nn.Flatten(0, 1), nn.Linear(128, 8_000))


class Mean(nn.Module):
    """The mean over the tokens, dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def text_classifier() -> nn.Module:
    """Two transformer layers of width 128 over vectors of tokens, their mean, and the logits of a text."""
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers, Mean(), nn.Linear(128, CLASSES))


# ---- workloads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A network, the shape of one input and how many make a batch.

    Attributes:
        title: what the tables call it.
        build: makes the network.
        shape: one input.
        batch_size: inputs a step.
        classes: the number of its logits.
        labels: the shape of the labels of one input: () for one label, (height, width) for one a pixel.
        flattened: whether the labels of a batch have one dimension, as those of a language model.
    """

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    classes: int = CLASSES
    labels: tuple[int, ...] = ()
    flattened: bool = False

    def model(self) -> nn.Module:
        """The same initial weights each time, so that every method starts alike."""
        torch.manual_seed(0)
        return self.build().train()

    def batches(self) -> Batches:
        """Noise with random labels: the time of a step does not depend on what is in the images."""
        generator = torch.Generator().manual_seed(0)
        return [self._batch(generator) for _ in range(BATCHES)]

    def _batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.batch_size, *self.shape, generator=generator)
        y = torch.randint(self.classes, (self.batch_size, *self.labels), generator=generator)
        return x, y.flatten() if self.flattened else y


def _mlp(*sizes: int, batch: int = 128) -> Workload:
    title = f"MLP {'-'.join(map(str, sizes))}"
    return Workload(title, partial(perceptron, sizes), (sizes[0],), batch, classes=sizes[-1])


_shufflenet = partial(torchvision_model, "shufflenet_v2_x1_0", CLASSES)
_resnet50 = partial(torchvision_model, "resnet50", 1000)
_vit_b16 = partial(torchvision_model, "vit_b_16", 1000)

ON_CPU = {
    "mlp-small": _mlp(64, 256, 256, CLASSES),
    "mlp": _mlp(784, 512, 512, CLASSES),
    "cnn": Workload("CNN 28x28", cnn, (1, 28, 28), 128),
    "resnet18": Workload("ResNet-18 32x32", resnet_cifar, (3, 32, 32), 32),
    "shufflenet": Workload("ShuffleNetV2 64x64", _shufflenet, (3, 64, 64), 64),
    "vit": Workload("ViT-Tiny, 6 layers, 32x32", vit_tiny, (3, 32, 32), 64),
    "pixels": Workload("21 classes a pixel, 64x64", segmentation, (3, 64, 64), 4, 21, labels=(64, 64)),
    "tokens": Workload(
        "8,000 classes a token, 64 tokens", language_model, (64, 128), 8, 8_000, labels=(64,), flattened=True
    ),
    "text": Workload("Text, 2 transformer layers, 64 tokens", text_classifier, (64, 128), 32),
}
ON_CUDA = {
    "resnet18-128": Workload("ResNet-18 32x32", resnet_cifar, (3, 32, 32), 128),
    "resnet50": Workload("ResNet-50 224x224", _resnet50, (3, 224, 224), 128, 1000),
    "vit-b16": Workload("ViT-B/16 224x224", _vit_b16, (3, 224, 224), 128, 1000),
}
# Networks whose logits are most of them.
MANY_CLASSES = {f"classes-{count}": _mlp(64, 128, count, batch=256) for count in (10, 1_000, 8_000, 50_000)}
WORKLOADS = ON_CPU | ON_CUDA | MANY_CLASSES


# ---- where and how they run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A device and a precision.

    ``bf16-channels-last`` is what a script on a recent GPU does: autocast to bfloat16 around forward and loss, weights
    in float32, images and convolutions in the channels-last layout.
    """

    device: str = "cpu"
    precision: str = "float32"

    @property
    def halved(self) -> bool:
        """Whether autocast to bfloat16 is on."""
        return self.precision == "bf16-channels-last"

    def model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in the layout."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.halved else model

    def batches(self, batches: Batches) -> Batches:
        """Move batches to the device, in the layout."""
        placed = [(x.to(self.device), y.to(self.device)) for x, y in batches]
        return [(channels_last(x), y) for x, y in placed] if self.halved else placed

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What forward and loss run in."""
        if self.halved:
            return torch.autocast(torch.device(self.device).type, torch.bfloat16)
        return contextlib.nullcontext()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Pictures in the channels-last layout; other inputs as they are."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
