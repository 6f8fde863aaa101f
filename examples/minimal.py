"""Training with the penalty and without it, on 100 of scikit-learn's digits (seconds on a laptop).

    python -m examples.minimal

It prints the accuracy on the other 1,697 images in five seeds, and the mean difference with its standard error.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCPOptimizer


def digits(train_size: float = 0.75) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, train_size=train_size, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.tensor(part) for part in parts)
    return x_train.float(), y_train, x_test.float(), y_test


def train(weight: float | Literal["auto"], seed: int) -> float:
    """Train with this weight of the penalty, and return the test accuracy in percent; weight=0 is plain training."""
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = digits(train_size=100)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = DCPOptimizer(base, model, weight=weight)  # new

    for _ in range(60):
        for x, y in loader:
            optimizer.zero_grad()
            z = model(x)
            loss = F.cross_entropy(z, y) + optimizer.penalty(z, y)  # new: the term
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) == y_test).double().mean().item()


def main() -> None:
    print("seed   without      with   difference")
    differences = []
    for seed in range(5):
        without = train(0, seed)
        with_penalty = train("auto", seed)
        differences.append(with_penalty - without)
        print(f"{seed:4} {without:9.2f} {with_penalty:9.2f} {differences[-1]:+12.2f}")
    error = stdev(differences) / len(differences) ** 0.5
    print(f"mean difference {mean(differences):+.2f} ± {error:.2f} points of test accuracy")


if __name__ == "__main__":
    main()
