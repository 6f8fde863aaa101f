"""The script that the demo compares: a small network on scikit-learn's digits, trained in several ways."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.trial import accuracy

__all__ = ["COMPANION", "METHODS", "load_digits", "train"]

METHODS = ("plain", "label smoothing", "DCP", "DCL")
COMPANION = "DCL's companion"
CLASSES = 10

Images = tuple[Tensor, Tensor]


def train(
    method: str,
    seed: int,
    *,
    train_size: int = 50,
    epochs: int = 100,
    wrong_labels: float = 0.0,
    label_smoothing: float = 0.4,
    split: str = "test",
) -> Iterator[float]:
    """Train from the seed's weights on its images, and yield the accuracy in percent every five epochs.

    The learning rate and the label smoothing were chosen on the validation images.
    """
    torch.manual_seed(seed)
    images, labels = training_images(seed, train_size, wrong_labels)
    model = make_model()
    criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing if method == "label smoothing" else 0.0)
    optimizer: Any = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    if method == "DCP":
        optimizer = DCPOptimizer(optimizer, model, num_classes=CLASSES)
    elif method in ("DCL", COMPANION):
        optimizer = DCLOptimizer(optimizer, model)
    scheduler = CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        # All methods draw the same batches.
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        for batch in torch.randperm(train_size, generator=generator).split(16):
            optimizer.zero_grad()
            z = model(images[batch])
            loss = criterion(z, labels[batch])
            if isinstance(optimizer, (DCPOptimizer, DCLOptimizer)):
                loss = loss + optimizer.penalty(z, labels[batch])
            loss.backward()
            optimizer.step()
        scheduler.step()
        if (epochs - 1 - epoch) % 5 == 0:
            network = optimizer.companion if method == COMPANION else model
            yield accuracy(network, [load_digits()[split]])


def training_images(seed: int, count: int, wrong_labels: float) -> Images:
    """Choose images of the pool, equally many of each class; a share of their labels is replaced by other classes."""
    images, labels = load_digits()["pool"]
    chosen = stratified_order(labels, seed)[:count]
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(count, generator=generator)[: round(wrong_labels * count)]
    given = labels[chosen]
    given[wrong] = (given[wrong] + torch.randint(1, CLASSES, wrong.shape, generator=generator)) % CLASSES
    return images[chosen], given


@functools.cache
def load_digits() -> dict[str, Images]:
    """Load the 1797 digits as (N, 1, 8, 8) in three parts, always the same: test, validation and pool."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.3
    labels = torch.from_numpy(digits.target)
    order = stratified_order(labels, seed=0)
    test, validation, pool = ((images[part], labels[part]) for part in order.split([597, 400, 800]))
    return {"test": test, "validation": validation, "pool": pool}


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """Shuffle samples so that every prefix has the classes in the whole's proportions, as far as it can."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    own = labels[shuffled]
    number = nn.functional.one_hot(own).cumsum(0).gather(1, own[:, None])[:, 0]  # among those of its class
    return shuffled[((number - 0.5) / own.bincount()[own]).argsort(stable=True)]


def make_model() -> nn.Module:
    """Build a network of four convolutions for images of shape (1, 8, 8)."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 32, CLASSES))
