"""timm's ViT-Tiny and Swin-Tiny with patches that suit the image's size; from 128 pixels on, ImageNet's own."""

from __future__ import annotations

from torch import nn


def vit_tiny(classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """ViT-Tiny with patches of 4x4 up to 63 pixels, 8x8 up to 127 and 16x16 from there on.

    Raises:
        ValueError: height or width is no multiple of the patch.
    """
    channels, *size = shape
    patch = 16 if min(size) >= 128 else 8 if min(size) >= 64 else 4
    return _timm("vit_tiny_patch16_224", classes, channels, size, patch)


def swin_tiny(classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """Swin-Tiny with patches of 2x2 up to 127 pixels and 4x4 from there on, in windows of 7x7 where they fit, else 4x4.

    Raises:
        ValueError: height or width is no multiple of the patch.
    """
    channels, *size = shape
    patch = 4 if min(size) >= 128 else 2
    window = 7 if all(side % (7 * patch) == 0 for side in size) else 4
    return _timm("swin_tiny_patch4_window7_224", classes, channels, size, patch, window_size=window)


def _timm(name: str, classes: int, channels: int, size: list[int], patch: int, **options: int) -> nn.Module:
    if any(side % patch for side in size):
        raise ValueError(
            f"shape is {(channels, *size)}; {name.split('_patch')[0]} needs a height and width that are multiples of "
            f"{patch} at this size"
        )
    import timm

    return timm.create_model(
        name, num_classes=classes, in_chans=channels, img_size=tuple(size), patch_size=patch, **options
    )
