"""Semi-supervised: FixMatch with 40 labels of scikit-learn's digits, with DCP and without (seconds on a laptop).

    python -m examples.semi_supervised

One forward pass has labelled and unlabelled images. The penalty is a term of the labelled rows. It prints the accuracy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from dcl_optim.trial import accuracy, compare

SURE = 0.95  # the probability from which a guess is taken for a label


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the images of training and test, and their labels."""
    found = load_digits()
    images = found.images[:, None].astype("float32") / 16
    parts = train_test_split(images, found.target, train_size=1000, random_state=seed)
    x, x_test, y, y_test = map(torch.from_numpy, parts)
    return x, x_test, y, y_test


def weak(x: Tensor) -> Tensor:
    """Move all images of the batch by at most a pixel."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return x.roll((down, right), dims=(2, 3))


def strong(x: Tensor) -> Tensor:
    """Move them, and hide a quarter of each image."""
    hidden = torch.rand(len(x), 1, 4, 4) < 0.25
    return weak(x).masked_fill(hidden.repeat_interleave(2, 2).repeat_interleave(2, 3), 0.5)


def network() -> nn.Sequential:
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))


def train(weight: Any, seed: int, steps: int = 500) -> float:
    """Return the test accuracy in percent; weight=0 is FixMatch alone."""
    torch.manual_seed(seed)
    x, x_test, y, y_test = digits(seed)
    labelled, _ = train_test_split(torch.arange(len(y)), train_size=40, stratify=y, random_state=seed)
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    optimizer = DCPOptimizer(base, model, weight=weight)
    for _ in range(steps):
        rows, unlabelled = labelled[torch.randperm(40)[:20]], torch.randint(len(x), (60,))
        images = torch.cat([weak(x[rows]), weak(x[unlabelled]), strong(x[unlabelled])])
        optimizer.zero_grad()
        z, of_weak, of_strong = model(images).split([20, 60, 60])
        probability, guess = of_weak.detach().softmax(1).max(1)
        by_row = F.cross_entropy(of_strong, guess, reduction="none")
        loss = F.cross_entropy(z, y[rows]) + (by_row * (probability > SURE)).mean()
        (loss + optimizer.penalty(z, y[rows])).backward()
        optimizer.step()
    return accuracy(model, [(x_test, y_test)])


if __name__ == "__main__":
    print(compare(train, {"FixMatch": 0, "with DCP": "auto"}, seeds=3))
