"""The networks that are timed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

CLASSES = 10


class Network(nn.Sequential):
    """A class of our own, as a script has it: torch.compile keeps the hooks of such a one outside of its graphs."""


def perceptron(sizes: Sequence[int]) -> nn.Module:
    """Linear layers of the given sizes, input first, with ReLU between them."""
    *hidden, (last, classes) = itertools.pairwise(sizes)
    layers = [layer for a, b in hidden for layer in (nn.Linear(a, b), nn.ReLU())]
    return Network(nn.Flatten(), *layers, nn.Linear(last, classes))


def cnn() -> nn.Module:
    """Two convolutions with batch norm on 28x28."""
    first, second = 16, 32
    return Network(
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


def shufflenet() -> nn.Module:
    """ShuffleNetV2 as torchvision has it: many small operations in place of a few large ones."""
    from torchvision import models

    return models.shufflenet_v2_x1_0(num_classes=CLASSES)


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
    return Network(*blocks, nn.Conv2d(32, 21, 1))


def language_model() -> nn.Module:
    """Two transformer layers of width 128 over vectors of tokens, and 8,000 logits a token, as rows (tokens, K)."""
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
    return Network(*layers, nn.Flatten(0, 1), nn.Linear(128, 8_000))


def resnet50() -> nn.Module:
    """ResNet-50 as ImageNet has it."""
    from torchvision import models

    return models.resnet50(num_classes=1000)


def vit_b16() -> nn.Module:
    """ViT-B/16 as ImageNet has it."""
    from torchvision import models

    return models.vit_b_16(num_classes=1000)
