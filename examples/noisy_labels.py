"""Wrong labels of few classes: keep the companion in place of the model (a minute on a laptop).

    python -m examples.noisy_labels

300 of scikit-learn's digits, 30 % of them with a wrong label; accuracies on 700 others, whose labels are right. A slow
companion remembers what the model had learned before it fitted the wrong labels. Which network is the better one differs
from script to script: decide on validation images.
"""

from __future__ import annotations

import copy
from statistics import mean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dcl_optim import DCLOptimizer


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = images[order].float().view(-1, 1, 8, 8) / 16, labels[order]
    y_train = torch.where(torch.rand(300) < 0.3, (y[:300] + torch.randint(1, 10, (300,))) % 10, y[:300])
    return x[:300], y_train, x[300:1000], y[300:1000]


def accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * (network.eval()(x).argmax(1) == y).double().mean().item()


def train(seed: int, weight: float) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = data(seed)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = DCLOptimizer(optimizer, model, weight=weight, alpha=0.99)
    for _ in range(100):
        for rows in torch.randperm(len(x_train)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
            optimizer.step()
    companion = copy.deepcopy(model)  # a network of its own: save its state_dict, and load it without dcl_optim
    companion.load_state_dict(optimizer.companion.state_dict())
    return model, companion, x_test, y_test


if __name__ == "__main__":
    for title, weight in (("plain", 0.0), ("DCL", 0.1)):
        trained = [train(seed, weight) for seed in range(5)]
        of_model = mean(accuracy(model, x, y) for model, _, x, y in trained)
        of_companion = mean(accuracy(companion, x, y) for _, companion, x, y in trained)
        print(f"{title}: {of_model:.1f} % of the model, {of_companion:.1f} % of its companion")
