"""Drawing one letter of a font as an image of 28x28, as it is and slightly distorted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 28
SCALE = 4  # drawn this much larger, then averaged down
BOX = 22 * SCALE  # the longer side of an undistorted letter
TURN = math.radians(10)
SLANT = 0.15
SMALLEST = 0.8


@lru_cache(maxsize=512)
def pen(font: Path, number: int) -> Callable[[str], Any]:
    """A function that draws a character of the font as a grey-scale image with no border, None if it has no ink.

    Args:
        font: the font's file.
        number: of the face in a collection of several; 0 in other files.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageFont
    except ImportError as error:
        raise ImportError("letters are drawn with Pillow: pip install fonttools pillow") from error
    face = ImageFont.truetype(str(font), SIDE * SCALE, number, layout_engine=ImageFont.Layout.BASIC)

    def draw(character: str) -> Any:
        mask = face.getmask(character, mode="L")
        image = Image.frombytes("L", mask.size, bytes(mask)) if 0 not in mask.size else None
        ink = image.getbbox() if image else None  # the mask is as wide as the letter's space in a line
        return image.crop(ink) if image and ink else None

    return draw


def plain(font: Path, character: str, number: int = 0) -> np.ndarray | None:
    """The letter centred in 28x28 (uint8, ink is 255), its longer side 22; None if it has no ink."""
    return _fitted(pen(font, number)(character), angle=0.0, slant=0.0, size=1.0)


def distorted(font: Path, character: str, draws: random.Random, number: int = 0) -> np.ndarray | None:
    """The letter turned by up to 10 degrees, slanted by up to 0.15 and shrunk by up to a fifth."""
    angle, slant = draws.uniform(-TURN, TURN), draws.uniform(-SLANT, SLANT)
    return _fitted(pen(font, number)(character), angle, slant, draws.uniform(SMALLEST, 1.0))


def _fitted(image: Any, angle: float, slant: float, size: float) -> np.ndarray | None:
    if image is None:
        return None
    from PIL import Image

    zoom = BOX * size / max(image.size)
    fitted = image.resize([max(SCALE, round(zoom * length)) for length in image.size], Image.Resampling.BOX)
    canvas = Image.new("L", (SIDE * SCALE, SIDE * SCALE))
    left, top = ((SIDE * SCALE - length) // 2 for length in fitted.size)
    canvas.paste(fitted, (left, top))
    if angle or slant:
        cos, sin, middle = math.cos(angle), math.sin(angle), (SIDE * SCALE - 1) / 2
        rows = ((cos + slant * sin, slant * cos - sin), (sin, cos))  # output pixel to input pixel
        affine = [value for a, b in rows for value in (a, b, middle - (a + b) * middle)]
        canvas = canvas.transform(canvas.size, Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    return np.asarray(canvas.reduce(SCALE))
