"""The images of a training: read from the data folder, or drawn at random to time a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.research import datasets
from examples.research.applications.fixmatch import Views, labelled
from examples.research.datasets.folders import SOURCES, Folders, leave_signals
from examples.research.datasets.listings import SIZES
from examples.research.paper.rows import Work
from examples.research.paper.session import Session

Batch = tuple[Tensor, Tensor]
# What brings a data set into the folder ROOT.
FETCH = {
    "cifar10": "python -c 'from torchvision.datasets import CIFAR10; CIFAR10(\"ROOT\", download=True)'",
    "cifar100": "python -c 'from torchvision.datasets import CIFAR100; CIFAR100(\"ROOT\", download=True)'",
    "tiny-imagenet": "curl -O http://cs231n.stanford.edu/tiny-imagenet-200.zip && "
    "unzip -q tiny-imagenet-200.zip -d ROOT",
    "imagenet": "by hand from https://image-net.org, the images of val/ sorted into folders of classes",
    "cub200": "by hand from https://www.vision.caltech.edu/datasets/cub_200_2011, unpacked in ROOT",
    "pets": "python -c 'from torchvision.datasets import OxfordIIITPet as P; "
    '[P("ROOT", split=s, download=True) for s in ("trainval", "test")]\'',
    "food101": "python -c 'from torchvision.datasets import Food101; Food101(\"ROOT\", download=True)'",
    "cars": "by hand, as torchvision's StanfordCars describes; its makers' page is gone",
}
FETCH |= {
    "cifar100-224": FETCH["cifar100"],
    "tiny-imagenet-224": FETCH["tiny-imagenet"],
    "imagenet-resized": FETCH["imagenet"],
}
PLACES = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "cifar100-224": "cifar-100-python",
    "tiny-imagenet": "tiny-imagenet-200",
    "tiny-imagenet-224": "tiny-imagenet-200",
    "imagenet": "imagenet",
    "imagenet-resized": "imagenet",
    "cub200": "CUB_200_2011",
    "pets": "oxford-iiit-pet",
    "food101": "food-101",
    "cars": "stanford_cars",
}


def folder(name: str, root: Path) -> Path:
    """The folder that a data set's own files are in: of ImageNet's train/ and val/ it is imagenet."""
    return root / "imagenet" if PLACES[name] == "imagenet" else root


def load(work: Work, session: Session, seed: int) -> Folders | Stream:
    """The images of a training: all training images, and as test images those that the paper tests on.

    Raises:
        ValueError: the files are missing or of another format.
    """
    chosen = work.configuration
    process = (session.rank, session.processes)
    data = _read(chosen.data, chosen.augmentation or "basic", session.data, session.workers, process)
    return data if work.task != "fixmatch" else Stream(data, work, seed, session.workers)


@lru_cache(maxsize=2)  # ImageNet's files take a minute to list
def _read(name: str, augmentation: str, root: Path, workers: int, process: tuple[int, int]) -> Folders:
    found = datasets.load(
        name,
        folder=folder(name, root),
        augmentation=augmentation,
        workers=workers,
        validation=0.0,
        process=process,
    )
    assert isinstance(found, Folders)
    return found


class Blank:
    """A data set of the right size without images."""

    def __init__(self, name: str) -> None:
        _, view = SOURCES[name]
        self.name, self.corruptions, self.shape = name, (), (len(view.mean), *(view.scaled or view.size))
        self.classes, self._count, _ = SIZES[name]
        self.class_names = tuple(map(str, range(self.classes)))

    def train_size(self) -> int:
        """The number of training samples."""
        return self._count

    def batch(self, size: int) -> Batch:
        """Random inputs and labels."""
        return torch.randn(size, *self.shape), torch.randint(self.classes, (size,))


class Stream:
    """FixMatch's batches: an epoch is so many steps, and the batch of a step depends on the seed and its number alone.

    Args:
        data: where labelled and unlabelled images are from.
        work: a training with the task fixmatch.
        seed: of the choice of the labelled images, of the order and of the distortions.
        workers: processes that distort images.
    """

    corruptions = ()

    def __init__(self, data: Folders, work: Work, seed: int, workers: int) -> None:
        self.name, self.classes, self.class_names, self.shape = data.name, data.classes, data.class_names, data.shape
        self._data, self._details, self._seed, self._workers = data, work.details, seed, workers
        self._batch = work.configuration.batch_size
        self.epochs = 0  # that are over
        self._steps: Steps | None = None

    def sizes(self) -> tuple[int, int, int]:
        """See :meth:`Folders.sizes`."""
        return self._data.sizes()

    def train_size(self) -> int:
        """The number of labelled images that an epoch shows, with repetitions."""
        return int(self._details["steps"]) * self._batch

    def epoch(
        self, batch_size: int, generator: torch.Generator, skip: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches of an epoch: of labelled, weak and strong views, one after the other, and the labels."""
        if self._steps is None:
            views = Views(self._data, mirror=True, together=1)
            numbers = labelled(views.labels, self._details["labels"], self._seed)
            self._steps = Steps(views, numbers, batch_size, self._details["ratio"], self._seed)
        first, count = self.epochs * self._details["steps"], self._details["steps"]
        loader = DataLoader(
            self._steps,
            batch_size=None,
            sampler=range(first + skip, first + count),
            num_workers=self._workers,
            generator=generator,
            worker_init_fn=leave_signals,
        )
        for x, y in loader:
            yield x, y, torch.arange(len(y))
        self.epochs += 1

    def same_class(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """See :meth:`examples.research.datasets.base.Data.same_class`."""
        return self._data.same_class(labels, generator)

    def fixed(self, part: str, batch_size: int = 500) -> Iterator[Batch]:
        """See :meth:`examples.research.datasets.base.Data.fixed`."""
        return self._data.fixed(part, batch_size)

    def corrupted(self, part: str, corruption: str, batch_size: int = 500) -> Iterator[Batch]:
        """There are none."""
        return self._data.corrupted(part, corruption, batch_size)


class Steps(Dataset[Batch]):
    """The batch of each step of FixMatch by its number."""

    def __init__(self, views: Views, numbers: Tensor, batch_size: int, ratio: int, seed: int) -> None:
        self._views, self._numbers, self._seed = views, numbers, seed
        self._sizes = (batch_size, ratio * batch_size)

    def __getitem__(self, step: int) -> Batch:
        known, unknown = self._sizes
        index = self._numbers[self._drawn(step, known, len(self._numbers), 0)]
        others = self._drawn(step, unknown, len(self._views.labels), 1)
        generator = self._generator(step, 2)
        views = self._views
        parts = (views.weak(index, generator), views.weak(others, generator), views.strong(others, generator))
        return torch.cat(parts), views.labels[index]

    def _drawn(self, step: int, size: int, count: int, purpose: int) -> Tensor:
        """The numbers of a step: in each pass over all of them every number once, shuffled."""
        places = torch.arange(step * size, (step + 1) * size)
        passes = {int(p): torch.randperm(count, generator=self._generator(int(p), purpose)) for p in places // count}
        return torch.stack([passes[int(place) // count][int(place) % count] for place in places])

    def _generator(self, number: int, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed((3 * self._seed + purpose) * 2**32 + number)
