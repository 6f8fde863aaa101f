"""Pictures with a class for each pixel: articles that overlap on a canvas, and PASCAL VOC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.research.datasets import FOLDER, load
from examples.research.datasets.splits import PARTS

ARTICLES = ("digits", "fashion-mnist", "noto-scripts")
NAMES = (*ARTICLES, "voc")
IGNORED = 255  # VOC's label of the pixels between an object and the rest
INK = 0.1  # from which brightness on a pixel is the article's
NOISE = 0.3
HELD_OUT = 500  # scenes for validation, and twice as many for the test
VOC_CLASSES = 21
VOC_VALIDATION = 8  # every eighth training image
Labelled = tuple[Tensor, Tensor]  # images (B, C, H, W), uint8, and each pixel's class (B, H, W)


@dataclass(frozen=True)
class Scenes:
    """Pictures in three parts and the number of classes, 0 being the background."""

    classes: int
    parts: dict[str, Labelled]


def read(
    data: str, *, folder: str | None = None, train_size: int = 1_000, articles: int = 3, size: int = 128
) -> Scenes:
    """Read or draw the images of one of :data:`NAMES`.

    Args:
        data: its name.
        folder: where its files are (default for VOC: runs/data, for articles as in ``datasets.load``).
        train_size: scenes to train on; of VOC's images at most so many.
        articles: in each scene.
        size: side of VOC's images after resizing, in pixels.

    Raises:
        ValueError: the name is unknown, the files are not there, or a number is too small.
    """
    if data not in NAMES:
        raise ValueError(f"data={data!r} is unknown; choose one of {', '.join(NAMES)}")
    if train_size < 2 or articles < 1:
        raise ValueError(f"train_size={train_size} must be at least 2, and articles={articles} at least 1")
    place = None if folder is None else Path(folder)
    return voc(place or FOLDER, train_size, size) if data == "voc" else overlapping(data, place, train_size, articles)


def compose(images: Tensor, labels: Tensor, count: int, articles: int, generator: torch.Generator) -> Labelled:
    """Draw scenes: random articles at random places of a canvas of twice their side, later ones over earlier ones.

    Args:
        images: (N, 1, S, S) between 0, black, and 1.
        labels: (N,); their pixels' class in a scene is the label + 1.
        count: scenes to draw.
        articles: in each scene.
        generator: the source of all randomness.
    """
    side = images.shape[-1]
    chosen = torch.randint(len(images), (count, articles), generator=generator)
    corners = torch.randint(side + 1, (count, articles, 2), generator=generator).tolist()
    x, y = torch.zeros(count, 1, 2 * side, 2 * side), torch.zeros(count, 2 * side, 2 * side, dtype=torch.long)
    for scene, (numbers, places) in enumerate(zip(chosen.tolist(), corners, strict=True)):
        for number, (top, left) in zip(numbers, places, strict=True):
            where = (scene, slice(top, top + side), slice(left, left + side))
            article, ink = images[number, 0], images[number, 0] > INK
            x[:, 0][where] = torch.where(ink, article, x[:, 0][where])
            y[where] = torch.where(ink, labels[number] + 1, y[where])
    x += NOISE * torch.randn(x.shape, generator=generator)
    return (255 * x.clamp(0, 1)).round().byte(), y


def overlapping(name: str, folder: Path | None, train_size: int, articles: int) -> Scenes:
    """Scenes of articles, always the same; those of a part have that part's articles only."""
    data, parts = load(name, folder=folder), {}
    counts = {"train": train_size, "validation": HELD_OUT, "test": 2 * HELD_OUT}
    for number, part in enumerate(PARTS):
        batches = list(data.fixed(part))
        images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        images = (images - images.min()) / (images.max() - images.min())  # the normalisation undone
        parts[part] = compose(images, labels, counts[part], articles, torch.Generator().manual_seed(number))
    return Scenes(data.classes + 1, parts)


def voc(folder: Path, train_size: int, size: int) -> Scenes:
    """PASCAL VOC 2012, resized to squares; its part ``val`` is the test, as the labels of its own test are not public.

    Args:
        folder: that has VOCdevkit/VOC2012.
        train_size: the most images to train on.
        size: side of the squares, in pixels.

    Raises:
        ValueError: the files are not there.
    """
    from torchvision import tv_tensors
    from torchvision.datasets import VOCSegmentation
    from torchvision.transforms import v2

    transform = v2.Compose([v2.ToImage(), v2.Resize((size, size))])

    def squares(part: str) -> Labelled:
        try:
            found = VOCSegmentation(folder, year="2012", image_set=part)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"cannot read folder={folder} ({error}); VOCdevkit/VOC2012 must be in it") from error
        pairs = [transform(image, tv_tensors.Mask(v2.functional.pil_to_tensor(mask))) for image, mask in found]
        return torch.stack([x for x, _ in pairs]), torch.cat([y for _, y in pairs]).long()

    x, y = squares("train")
    held_out = torch.arange(len(x)) % VOC_VALIDATION == 0
    train = (x[~held_out][:train_size], y[~held_out][:train_size])
    return Scenes(VOC_CLASSES, {"train": train, "validation": (x[held_out], y[held_out]), "test": squares("val")})
