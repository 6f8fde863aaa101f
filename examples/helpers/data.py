"""Digits and Fashion-MNIST as tensors, and batches of them."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where `apt-get install dataset-fashion-mnist` puts the files
IDX_BYTES = 0x08  # the idx format's code for unsigned bytes, the only type that these files have
CLASSES = 10


class DataError(Exception):
    """The data cannot be read; the message says what to do about it."""


@dataclass(frozen=True)
class Images:
    """Pictures (count, 1, height, width), normalised by the training set, and labels."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    augmented: bool

    def head(self, count: int) -> Images:
        """Keep a random part of the training set, the same one for every seed so that runs compare."""
        if count > len(self.x_train):
            raise DataError(f"--train-size {count} is more than the {len(self.x_train)} images there are")
        kept = torch.randperm(len(self.x_train), generator=torch.Generator().manual_seed(0))[:count]
        return Images(self.x_train[kept], self.y_train[kept], self.x_test, self.y_test, self.augmented)


def _normalised(x_train: Tensor, y_train: Tensor, x_test: Tensor, y_test: Tensor, augmented: bool) -> Images:
    mean, std = x_train.mean(), x_train.std()
    return Images((x_train - mean) / std, y_train.long(), (x_test - mean) / std, y_test.long(), augmented)


def digits() -> Images:
    """scikit-learn's 1797 digits of 8x8, a fifth of them held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images).float().unsqueeze(1)
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return _normalised(x[train], y[train], x[test], y[test], augmented=False)


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of unsigned bytes.

    Raises:
        DataError: the file is missing, no gzip, no idx file of bytes, or has more or fewer values than it says.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise DataError(
            f"cannot read {path} ({error}); install the Debian package dataset-fashion-mnist, pass --data=<folder of "
            "the four .gz files>, or --download"
        ) from error
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != bytes((0, 0, IDX_BYTES)) or len(content) < start:
        raise DataError(f"{path} is not an idx file of unsigned bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:]
    if values.numel() != torch.Size(shape).numel():
        raise DataError(f"{path} says it holds {shape} values but has {values.numel()}")
    return values.reshape(shape)


def fashion_mnist(folder: Path | None = None, download: bool = False) -> Images:
    """Zalando's 70 000 articles of 28x28: from the four .gz files in a folder, or downloaded by torchvision."""
    if download:
        arrays = _downloaded(folder or Path("runs/data"))
    else:
        names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        arrays = [read_idx((folder or DEBIAN) / f"{name}-ubyte.gz") for name in names]
    x_train, y_train, x_test, y_test = arrays
    for part, x, y in (("training", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
            raise DataError(f"the {part} files do not match: images {tuple(x.shape)}, labels {tuple(y.shape)}")
    scaled = [x.unsqueeze(1).float() / 255 for x in (x_train, x_test)]
    return _normalised(scaled[0], y_train, scaled[1], y_test, augmented=True)


def _downloaded(folder: Path) -> list[Tensor]:
    try:
        from torchvision.datasets import FashionMNIST
    except ImportError as error:
        raise DataError("--download needs torchvision: pip install torchvision") from error
    parts = [FashionMNIST(str(folder), train=train, download=True) for train in (True, False)]
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def training_loader(images: Images, batch_size: int, generator: torch.Generator) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches; whole batches are fetched at once because the images are in memory anyway."""
    data = TensorDataset(images.x_train, images.y_train)
    lone_last = len(data) % batch_size == 1  # which batch normalisation could not take
    sampler = BatchSampler(RandomSampler(data, generator=generator), batch_size, drop_last=lone_last)
    return DataLoader(data, sampler=sampler, batch_size=None, generator=generator)


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shift each image by up to ``padding`` pixels and mirror half of them."""
    count, _, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    columns = torch.arange(width).expand(count, width)
    flipped = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(flipped, width - 1 - columns, columns) + left
    rows = torch.arange(height) + top
    black = float(x.min())  # the images are normalised: zero would be a grey frame that no image has
    padded = F.pad(x, (padding,) * 4, value=black)[:, 0]
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]].unsqueeze(1)
