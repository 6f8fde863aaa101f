"""Fine-tuning: a network trained on five digits learns the other five from a few images (seconds on a laptop).

    python -m examples.fine_tuning

The classifier is new and all weights are trained, the pretrained ones at a tenth of the learning rate: parameter groups
are the base optimizer's. It prints the accuracy with DCP and without.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dcl_optim import DCPOptimizer


def digits(*classes: int) -> tuple[Tensor, Tensor]:
    """Give the images of five consecutive classes, and their labels from 0 to 4."""
    found = load_digits()
    x, y = torch.tensor(found.images / 16).float().unsqueeze(1), torch.tensor(found.target)
    is_one = torch.isin(y, torch.tensor(classes))
    return x[is_one], y[is_one] - min(classes)


def features() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
    )


def fit(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(10):
            optimizer.zero_grad()
            z = model(x[rows])
            loss = F.cross_entropy(z, y[rows])
            if isinstance(optimizer, DCPOptimizer):
                loss = loss + optimizer.penalty(z, y[rows])
            loss.backward()
            optimizer.step()


def pretrained(epochs: int = 5) -> nn.Sequential:
    """Train on the digits 0 to 4, and return the layers before the classifier."""
    torch.manual_seed(0)
    body = features()
    model = nn.Sequential(body, nn.Linear(512, 5))
    fit(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, *digits(0, 1, 2, 3, 4), epochs)
    return body


def fine_tune(
    body: nn.Sequential, weight: float | Literal["auto"], seed: int, shots: int = 5, epochs: int = 20
) -> float:
    """Return the accuracy in per cent on the digits 5 to 9 after some images of each; weight=0 is plain training."""
    torch.manual_seed(seed)
    x, y = digits(5, 6, 7, 8, 9)
    shuffled = torch.randperm(len(y))
    training = torch.cat([shuffled[y[shuffled] == label][:5] for label in range(5)])
    test = shuffled[~torch.isin(shuffled, training)]

    model = nn.Sequential(copy.deepcopy(body), nn.Linear(512, 5))
    groups = [{"params": model[0].parameters(), "lr": 0.005}, {"params": model[1].parameters()}]
    base = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    fit(DCPOptimizer(base, model, weight=weight), model, x[training], y[training], epochs)

    model.eval()
    with torch.no_grad():
        return 100 * (model(x[test]).argmax(1) == y[test]).float().mean().item()


def main() -> None:
    body = pretrained()
    print("seed   without      with")
    for seed in range(5):
        print(f"{seed:4} {fine_tune(body, 0, seed):9.2f} {fine_tune(body, 'auto', seed):9.2f}", flush=True)


if __name__ == "__main__":
    main()
