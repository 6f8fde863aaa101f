"""Fine-tuning: a network trained on five digits learns the other five from a few images (seconds on a laptop).

    python -m examples.fine_tuning

The classifier is new and all weights are trained, the pretrained ones at a tenth of the learning rate: parameter groups
are the base optimizer's. It prints the accuracy with DCP and without.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from dcl_optim import DCPOptimizer
from dcl_optim.trial import accuracy, compare


def digits(first: int) -> tuple[Tensor, Tensor]:
    """Give the images of five classes, and their labels from 0 to 4."""
    found = load_digits()
    x, y = torch.tensor(found.images / 16).float().unsqueeze(1), torch.tensor(found.target)
    is_one = (y >= first) & (y < first + 5)
    return x[is_one], y[is_one] - first


def features() -> nn.Sequential:
    return nn.Sequential(Conv2dNormActivation(1, 16), Conv2dNormActivation(16, 32, stride=2), nn.Flatten())


def fit(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(10):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def pretrained(epochs: int = 5) -> nn.Sequential:
    """Train on the digits 0 to 4, and return the layers before the classifier."""
    torch.manual_seed(0)
    body = features()
    model = nn.Sequential(body, nn.Linear(512, 5))
    fit(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, *digits(0), epochs)
    return body


def fine_tune(body: nn.Sequential, weight: Any, seed: int, epochs: int = 20) -> float:
    """Return the accuracy in percent on the digits 5 to 9 after some images of each; weight=0 is plain training."""
    torch.manual_seed(seed)
    x, y = digits(5)
    shuffled = torch.randperm(len(y))
    training = torch.cat([shuffled[y[shuffled] == label][:5] for label in range(5)])
    test = shuffled[~torch.isin(shuffled, training)]

    model = nn.Sequential(copy.deepcopy(body), nn.Linear(512, 5))
    groups = [{"params": model[0].parameters(), "lr": 0.005}, {"params": model[1].parameters()}]
    base = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    fit(DCPOptimizer(base, model, weight=weight), model, x[training], y[training], epochs)
    return accuracy(model, [(x[test], y[test])])


if __name__ == "__main__":
    print(compare(partial(fine_tune, pretrained()), {"plain": 0, "DCP": "auto"}, seeds=5))
