"""Harder versions of test images, always the same ones: what a network that learned from clean images makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SEED = 0


def corrupt(images: Tensor, name: str) -> Tensor:
    """Corrupt images in one of the ways of :data:`NAMES`.

    Args:
        images: (N, C, H, W), uint8.
        name: of the corruption.

    Raises:
        ValueError: the name is unknown, or the images are not uint8.
        ImportError: torchvision is not installed.
    """
    if name not in _CORRUPTIONS:
        raise ValueError(f"name={name!r} is unknown; choose one of {', '.join(NAMES)}")
    if images.dtype != torch.uint8:
        raise ValueError(f"images must be uint8, got {images.dtype}")
    return _CORRUPTIONS[name](images, torch.Generator().manual_seed(SEED))


def _functional() -> Any:
    try:
        from torchvision.transforms.v2 import functional
    except ImportError as error:
        raise ImportError("corrupted images need torchvision: pip install torchvision") from error
    return functional


def _noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise with a standard deviation of a fifth of the range."""
    noise = 255 * 0.2 * torch.randn(images.shape, generator=generator)
    return (images + noise).round().clamp(0, 255).to(torch.uint8)


def _blur(images: Tensor, generator: torch.Generator) -> Tensor:
    return _functional().gaussian_blur(images, kernel_size=[7, 7], sigma=[1.2, 1.2])


def _contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Bring all values to 30 % of their distance from the image's mean."""
    return _functional().adjust_contrast(images, 0.3)


def _rotation(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn every image by 20 degrees, each second one to the other side."""
    functional = _functional()
    turned = [functional.rotate(images[start::2], angle) for start, angle in ((0, 20.0), (1, -20.0))]
    found = torch.empty_like(images)
    found[0::2], found[1::2] = turned
    return found


def _occlusion(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blacken a random square with a third of the image's side."""
    height, width = images.shape[-2:]
    side = min(height, width) // 3
    found = images.clone()
    rows, columns = (
        torch.randint(length - side + 1, (len(images),), generator=generator) for length in (height, width)
    )
    for image, row, column in zip(found, rows.tolist(), columns.tolist(), strict=True):
        image[:, row : row + side, column : column + side] = 0
    return found


_CORRUPTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "rotation": _rotation,
    "occlusion": _occlusion,
}
NAMES = tuple(_CORRUPTIONS)
