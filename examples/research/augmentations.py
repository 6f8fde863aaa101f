"""Augmentations by name, and the way from an image to a network's input.

``none``; ``crop``: random crop; ``basic``: crop and mirror, what the paper's appendix names; ``authors``: what its
published code does instead, crop with grey borders, mirror, AutoAugment's CIFAR-10 policy (Cubuk et al. 2019) and
Cutout (DeVries and Taylor 2017); ``trivial``: crop, mirror and TrivialAugment (Müller and Hutter 2021); ``rand``: crop,
mirror and timm's RandAugment (Cubuk et al. 2020), for PIL images.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("none", "crop", "basic", "authors", "trivial", "rand")
CROPS = ("padded", "cut", "resized")
PADDING = 4
GREY = 128
CUTOUT = 16
MARGIN = 8 / 7  # 256 pixels for inputs of 224
RAND_AUGMENT = "rand-m9-mstd0.5-inc1"  # the setting of timm's own recipes


@dataclass(frozen=True)
class View:
    """How an image becomes an input.

    Args:
        size: height and width of the input.
        mean: of each channel, of values between 0 and 1.
        std: like ``mean``.
        crop: ``padded`` for images of the right size: crops of them with a border of 4. ``cut`` resizes the shorter
            side to 8/7 of the input's and crops that. ``resized`` crops 8 to 100 % of the area and resizes that.
        border: the color of the border of ``padded``; ``authors`` has a grey one.
        scaled: height and width that the input is scaled to at the end; None: it stays as it is.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: str = "padded"
    border: int = 0
    scaled: tuple[int, int] | None = None


def check(name: str) -> str:
    """Return a known augmentation's name; ValueError for others."""
    if name not in NAMES:
        raise ValueError(f"augmentation={name!r} is unknown; choose one of {', '.join(NAMES)}")
    return name


class Cutout:
    """Set a square of normalised (C, H, W) to 0, the mean; its centre may be any pixel, what lies outside is cut."""

    def __init__(self, side: int = CUTOUT) -> None:
        self.half = side // 2

    def __call__(self, image: Tensor) -> Tensor:
        row, column = (int(torch.randint(length, ())) for length in image.shape[-2:])
        rows = slice(max(0, row - self.half), row + self.half)
        columns = slice(max(0, column - self.half), column + self.half)
        image = image.clone()
        image[..., rows, columns] = 0
        return image


class TimmRandAugment:
    """timm's RandAugment; it draws from the generators of Python and numpy, which get a seed of torch's for each image.

    Args:
        view: of the images; its mean fills what a shift leaves, as in timm's own transforms.
    """

    def __init__(self, view: View) -> None:
        try:
            from timm.data.auto_augment import rand_augment_transform
        except ImportError as error:
            raise ImportError("augmentation='rand' needs timm: pip install timm") from error
        mean = tuple(round(255 * value) for value in view.mean)
        options = {"translate_const": int(0.45 * min(view.size)), "img_mean": mean}
        self._transform = rand_augment_transform(RAND_AUGMENT, options)

    def __call__(self, image: Any) -> Any:
        seed = int(torch.randint(2**31, ()))
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - timm's own
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            return self._transform(image)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def training(name: str, view: View) -> Callable[[Any], Tensor]:
    """The augmentation of one image (PIL or uint8 tensor (C, H, W)); it draws from torch's global generator.

    Raises:
        ValueError: the name is unknown, or the images are too small for ``authors``.
    """
    if check(name) == "none":
        return evaluation(view)
    if name == "authors" and min(view.size) <= CUTOUT:
        raise ValueError(f"augmentation='authors' cuts {CUTOUT} pixels out of {view.size}; choose 'basic'")
    v2 = _transforms()
    steps = _random_crop(view, GREY if name == "authors" else view.border)
    if name != "crop":
        steps.append(v2.RandomHorizontalFlip())
    if name == "authors":
        steps.append(v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10))
    if name == "trivial":
        steps.append(v2.TrivialAugmentWide())
    if name == "rand":
        steps.append(TimmRandAugment(view))
    steps += _normalisation(view)
    return v2.Compose([*steps, Cutout()] if name == "authors" else steps)


def evaluation(view: View) -> Callable[[Any], Tensor]:
    """The way of an image that is not augmented: its middle, normalised."""
    v2 = _transforms()
    if view.crop == "padded":
        return v2.Compose(_normalisation(view))
    return v2.Compose([v2.Resize(_enlarged(view)), v2.CenterCrop(view.size), *_normalisation(view)])


def seeded(transform: Callable[[Any], Tensor], picture: Any, seed: int) -> Tensor:
    """Apply a transform as if torch's global generator had this seed, and leave that generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset the GPU's generator too
        return transform(picture)


def batch_crop(x: Tensor, generator: torch.Generator, flip: bool, padding: int = PADDING, border: int = 0) -> Tensor:
    """Crop each of (B, C, H, W) from itself with a border of one color and, with ``flip``, mirror half of them."""
    count, _, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    columns = torch.arange(width).expand(count, width)
    if flip:
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
    rows, columns = torch.arange(height) + top, columns + left
    padded = F.pad(x, (padding,) * 4, value=border)
    pixels = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return pixels.permute(0, 3, 1, 2)


def _random_crop(view: View, fill: int) -> list[Any]:
    v2 = _transforms()
    if view.crop == "padded":
        return [v2.RandomCrop(view.size, padding=PADDING, fill=fill)]
    if view.crop == "cut":
        return [v2.Resize(_enlarged(view)), v2.RandomCrop(view.size)]
    if view.crop == "resized":
        return [v2.RandomResizedCrop(view.size)]
    raise ValueError(f"crop={view.crop!r} is unknown; choose one of {', '.join(CROPS)}")


def _enlarged(view: View) -> int:
    return round(max(view.size) * MARGIN)


def _normalisation(view: View) -> list[Any]:
    v2 = _transforms()
    to_floats = v2.ToDtype(torch.float32, scale=True)
    scaling = [v2.Resize(view.scaled, antialias=True)] if view.scaled else []
    return [*scaling, v2.ToImage(), to_floats, v2.Normalize(list(view.mean), list(view.std)), v2.ToPureTensor()]


def _transforms() -> Any:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ImportError("this augmentation needs torchvision: pip install torchvision") from error
    return v2
