"""What a data set is to the experiments, and data sets that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.research.augmentations import View, batch_crop, check, seeded, training
from examples.research.datasets.splits import check_part

Pictures = tuple[Tensor, Tensor]  # (count, C, H, W) uint8 or float, and labels (count,)


class Data(Protocol):
    """Pictures of some classes in three parts."""

    name: str
    classes: int
    class_names: Sequence[str]
    shape: tuple[int, int, int]

    def train_size(self) -> int:
        """The number of training samples."""

    def epoch(
        self, batch_size: int, generator: torch.Generator, skip: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """One shuffled, augmented pass over the training part: batches of inputs, labels and sample numbers.

        All randomness is the generator's. A last batch of one is dropped: batch normalisation could not take it. With
        ``skip`` the first batches are left out, and the others are what they are without.
        """

    def same_class(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """A random training sample of the class of each label (B,), augmented; all randomness is the generator's."""

    def fixed(self, part: str, batch_size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of ``train``, ``validation`` or ``test`` in order and not augmented."""


def batches(count: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """The numbers below ``count``, shuffled and in batches, a lone last one dropped."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    order = torch.randperm(count, generator=generator)
    return list(order[: count - (count % batch_size == 1)].split(batch_size))


def steps_per_epoch(count: int, batch_size: int) -> int:
    """How many :func:`batches` there are."""
    return math.ceil((count - (count % batch_size == 1)) / batch_size)


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """One seed for each sample, so that its augmentation does not depend on the others or on the worker."""
    return torch.randint(2**62, (count,), generator=generator).tolist()


class ByClass:
    """Draws samples by their class.

    Args:
        labels: of all samples, (count,).
    """

    def __init__(self, labels: Tensor) -> None:
        self._order, self._counts = labels.argsort(stable=True), labels.bincount()
        self._starts = self._counts.cumsum(0) - self._counts

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """The number of one sample of the class of each label (B,); each of the class is as likely."""
        draws = torch.randint(2**62, (len(labels),), generator=generator)
        return self._order[self._starts[labels] + draws % self._counts[labels]]


def few(images: Tensor, labels: Tensor, shots: int, seed: int) -> Pictures:
    """So many random images of each class; all of a class that has fewer."""
    if shots < 1:
        raise ValueError(f"shots={shots} must be at least 1")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = torch.cat([order[labels[order] == label][:shots] for label in labels.unique()])
    return images[chosen], labels[chosen]


class InMemory:
    """Tensors, normalised for each channel by the training images' mean and standard deviation.

    Args:
        name: of the data set.
        class_names: what the labels 0, 1, ... mean.
        parts: ``train``, ``validation`` and ``test``: images (count, C, H, W), uint8 or float, where 0 is black, and
            labels (count,).
        augmentation: one of :data:`examples.research.augmentations.NAMES`; those beyond ``basic`` need uint8.

    Raises:
        ValueError: the augmentation is unknown or cannot take the images.
    """

    def __init__(
        self,
        name: str,
        class_names: Sequence[str],
        parts: Mapping[str, Pictures],
        augmentation: str = "none",
    ) -> None:
        self.name, self.class_names, self.augmentation = name, tuple(class_names), check(augmentation)
        self.classes = len(self.class_names)
        self._parts = dict(parts)
        self._by_class = ByClass(parts["train"][1])
        images = parts["train"][0]
        channels, height, width = images.shape[1:]
        self.shape = (int(channels), int(height), int(width))
        self._scale = 1 / 255 if images.dtype == torch.uint8 else 1.0
        values = images.transpose(0, 1).flatten(1).double() * self._scale
        self._mean, self._std = (found.float()[:, None, None] for found in (values.mean(1), values.std(1)))
        self._transform = None
        if augmentation not in ("none", "crop", "basic"):
            if images.dtype != torch.uint8:
                raise ValueError(f"augmentation={augmentation!r} needs uint8 images, not {images.dtype}")
            mean, std = (tuple(found.flatten().tolist()) for found in (self._mean, self._std))
            self._transform = training(augmentation, View((height, width), mean, std))

    def train_size(self) -> int:
        """The number of training samples."""
        return len(self._parts["train"][1])

    def epoch(
        self, batch_size: int, generator: torch.Generator, skip: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """See :meth:`Data.epoch`."""
        images, labels = self._parts["train"]
        for number, index in enumerate(batches(len(labels), batch_size, generator)):
            x = self._augmented(images[index], generator)
            if number >= skip:
                yield x, labels[index], index

    def same_class(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """See :meth:`Data.same_class`."""
        return self._augmented(self._parts["train"][0][self._by_class.draw(labels, generator)], generator)

    def fixed(self, part: str, batch_size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`Data.fixed`."""
        return self._in_order(*self._parts[check_part(part)], batch_size)

    def _in_order(self, images: Tensor, labels: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            yield self._normalised(x), y

    def relabel(self, share: float, generator: torch.Generator) -> None:
        """Replace the labels of a random share of the training samples by another class, each as likely.

        Raises:
            ValueError: the share is not in [0, 1].
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share!r} must be in [0, 1]")
        images, labels = self._parts["train"]
        chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
        steps = torch.randint(1, self.classes, (len(chosen),), generator=generator)
        labels = labels.index_copy(0, chosen, (labels[chosen] + steps) % self.classes)
        self._parts["train"], self._by_class = (images, labels), ByClass(labels)

    def limit(self, shots: int, seed: int) -> None:
        """Keep so many random training samples of each class, see :func:`few`."""
        self._parts["train"] = few(*self._parts["train"], shots, seed)
        self._by_class = ByClass(self._parts["train"][1])

    def enlarge(self, side: int) -> None:
        """Scale the images to squares of this side; gray ones get three equal channels, as networks from ImageNet take.

        Call it before the first pass.
        """
        for part, (images, labels) in self._parts.items():
            scaled = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
            if images.dtype == torch.uint8:
                scaled = scaled.round().to(torch.uint8)
            self._parts[part] = (scaled.expand(-1, 3, -1, -1), labels)
        self.shape = (3, side, side)

    def _augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if self._transform is not None:
            seeds = draw_seeds(len(x), generator)
            return torch.stack([seeded(self._transform, one, seed) for one, seed in zip(x, seeds, strict=True)])
        if self.augmentation != "none":
            x = batch_crop(x, generator, flip=self.augmentation == "basic")
        return self._normalised(x)

    def _normalised(self, x: Tensor) -> Tensor:
        return (x.float() * self._scale - self._mean) / self._std
