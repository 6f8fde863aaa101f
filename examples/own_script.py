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

IMAGES, LABELS = map(torch.from_numpy, load_digits(return_X_y=True))
X, Y = IMAGES.float().view(-1, 1, 8, 8) / 16, LABELS


def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """A model, its plain optimizer and one batch."""
    convolutions = [nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*convolutions, *head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return model, optimizer, (X[:25], Y[:25])


def train(weight: Any, seed: int) -> float:
    """Train on five images of each digit with this weight of the penalty; 0 is plain training."""
    torch.manual_seed(seed)
    order = torch.randperm(len(Y))
    few = torch.cat([order[Y[order] == digit][:5] for digit in range(10)])
    others = order[-800:]
    model, optimizer, _ = make()
    optimizer = DCPOptimizer(optimizer, model, weight=weight)
    for _ in range(60):
        for rows in few[torch.randperm(len(few))].split(25):
            optimizer.zero_grad()
            z = model(X[rows])
            loss = F.cross_entropy(z, Y[rows]) + optimizer.penalty(z, Y[rows])
            loss.backward()
            optimizer.step()
    return accuracy(model, [(X[others], Y[others])])


if __name__ == "__main__":
    print(compare(train))
    print(overhead(*make()))
