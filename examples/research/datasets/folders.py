"""Data sets of image files, read and augmented by worker processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.research.augmentations import View, evaluation, seeded, training
from examples.research.datasets import listings
from examples.research.datasets.base import ByClass, batches, draw_seeds
from examples.research.datasets.listings import Listing
from examples.research.datasets.splits import check_part, train_and_validation

VALIDATION = 0.1  # of the training images
Batch = tuple[Tensor, Tensor]
LARGE = (224, 224)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FINE = View(LARGE, *IMAGENET, crop="cut")

SOURCES: dict[str, tuple[Callable[[Path, bool], tuple[Listing, Listing]], View]] = {
    "cifar10": (listings.cifar10, View((32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
    "cifar100": (listings.cifar100, View((32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))),
    "cifar100-224": (listings.cifar100, View((32, 32), *IMAGENET, scaled=LARGE)),  # for networks from ImageNet
    "tiny-imagenet": (listings.tiny_imagenet, View((64, 64), (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))),
    "tiny-imagenet-224": (listings.tiny_imagenet, View((64, 64), *IMAGENET, scaled=LARGE)),
    "imagenet": (listings.imagenet, FINE),
    "imagenet-resized": (listings.imagenet, View(LARGE, *IMAGENET, crop="resized")),
    "cub200": (listings.cub200, FINE),
    "pets": (listings.pets, FINE),
    "food101": (listings.food101, FINE),
    "cars": (listings.cars, FINE),
}


@dataclass(frozen=True)
class Transformed(Dataset[Batch]):
    """A listing's images as inputs; a key is an image's number and the seed of its transform."""

    listing: Listing
    transform: Callable[[Any], Tensor]

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        number, seed = key
        return seeded(self.transform, self.listing.pictures[number][0], seed), self.listing.labels[number]


class Folders:
    """A data set of :data:`SOURCES`, a share of its training images, of each class, held out for validation.

    Args:
        name: a key of :data:`SOURCES`.
        folder: that has the data set's own folder; for imagenet the one with train/ and val/.
        download: fetch it first, where torchvision can.
        train_size: how many training images to use; None: all.
        augmentation: one of :data:`examples.research.augmentations.NAMES`.
        workers: processes that read images; the batches do not depend on how many.
        seed: of the validation split.
        validation: the share that is held out. Default a tenth.
        process: which of how many processes this is; each has its share of every batch.

    Raises:
        ImportError: torchvision is not installed.
        ValueError: the files are missing or not what they should be, or an argument is out of range.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        download: bool = False,
        train_size: int | None = None,
        augmentation: str = "basic",
        workers: int = 0,
        seed: int = 0,
        validation: float = VALIDATION,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        source, view = SOURCES[name]
        train, test = _found(name, source, folder, download)
        self.name, self.class_names = name, tuple(train.names)
        self.classes, self.shape = len(self.class_names), (len(view.mean), *(view.scaled or view.size))
        self._workers, self._process = workers, process
        self._augmented = Transformed(train, training(augmentation, view))
        held_out = round(validation * len(train.labels))
        numbers, kept = train_and_validation(train.labels, held_out, train_size, seed)
        self._by_class = ByClass(train.labels[numbers])
        plain = evaluation(view)
        self._fixed = {
            "train": (Transformed(train, plain), numbers),
            "validation": (Transformed(train, plain), kept),
            "test": (Transformed(test, plain), torch.arange(len(test.labels))),
        }

    def train_size(self) -> int:
        """The number of training samples."""
        return len(self._fixed["train"][1])

    def sizes(self) -> tuple[int, int, int]:
        """The numbers of classes, training images and test images."""
        return self.classes, self.train_size(), len(self._fixed["test"][1])

    def epoch(
        self, batch_size: int, generator: torch.Generator, skip: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """See :meth:`examples.research.datasets.base.Data.epoch`.

        Of a batch that the processes cannot share evenly the last images are left out.
        """
        numbers, (rank, processes) = self._fixed["train"][1], self._process
        indices = batches(len(numbers), batch_size, generator)
        keys = [list(zip(numbers[i].tolist(), draw_seeds(len(i), generator), strict=True)) for i in indices]
        shares = [slice(rank, len(index) - len(index) % processes, processes) for index in indices]
        keys = [key[share] for key, share in zip(keys, shares, strict=True)][skip:]
        indices = [index[share] for index, share in zip(indices, shares, strict=True)][skip:]
        for (x, y), index in zip(self._loader(self._augmented, keys, generator), indices, strict=True):
            yield x, y, index

    def same_class(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """See :meth:`examples.research.datasets.base.Data.same_class`; read by this process, not by workers."""
        numbers = self._fixed["train"][1][self._by_class.draw(labels, generator)]
        keys = zip(numbers.tolist(), draw_seeds(len(numbers), generator), strict=True)
        return torch.stack([self._augmented[key][0] for key in keys])

    def fixed(self, part: str, batch_size: int = 500) -> Iterator[Batch]:
        """See :meth:`examples.research.datasets.base.Data.fixed`."""
        data, numbers = self._fixed[check_part(part)]
        keys = [[(number, 0) for number in some.tolist()] for some in numbers.split(batch_size)]
        yield from self._loader(data, keys, torch.Generator())  # without one it would draw from the global generator

    def _loader(self, data: Transformed, keys: list[Any], generator: torch.Generator) -> DataLoader[Batch]:
        return DataLoader(
            data, batch_sampler=keys, num_workers=self._workers, generator=generator, worker_init_fn=leave_signals
        )


def leave_signals(worker: int) -> None:
    """Let the main process decide what an interruption does, as ``worker_init_fn`` of a DataLoader."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _found(name: str, source: Callable[..., Any], folder: Path, download: bool) -> tuple[Listing, Listing]:
    try:
        return source(folder, download)
    except ImportError as error:
        raise ImportError(
            f"{name} is read by torchvision (cars by scipy too): pip install torchvision scipy"
        ) from error
    except (OSError, RuntimeError, KeyError) as error:
        layout = " ".join((source.__doc__ or "").split())
        raise ValueError(f"cannot read {name} from folder={folder} ({error}); expected in it: {layout}") from error
