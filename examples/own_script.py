"""Your script in a trial: what DCP gains in it over ten seeds, and what a step costs (a minute on a laptop).

    python -m examples.own_script
    python -m dcl_optim compare examples/own_script.py:train
    python -m dcl_optim overhead examples/own_script.py:make

Put your data, network and loop in the place of these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from dcl_optim.trial import accuracy, compare, overhead


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """50 training images and 1,000 others."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = images[order].float().view(-1, 1, 8, 8) / 16, labels[order]
    return x[:50], y[:50], x[50:1050], y[50:1050]


def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """A model, its plain optimizer and one batch."""
    layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    x, y, _, _ = data(seed=0)
    return model, optimizer, (x[:10], y[:10])


def train(weight: Any, seed: int) -> float:
    """Train with this weight of the penalty; 0 is plain training."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = data(seed)
    model, optimizer, _ = make()
    optimizer = DCPOptimizer(optimizer, model, weight=weight)
    for _ in range(60):
        for rows in torch.randperm(len(x)).split(10):
            optimizer.zero_grad()
            z = model(x[rows])
            loss = F.cross_entropy(z, y[rows]) + optimizer.penalty(z, y[rows])
            loss.backward()
            optimizer.step()
    return accuracy(model, [(x_test, y_test)])


if __name__ == "__main__":
    print(compare(train))
    print(overhead(*make()))
