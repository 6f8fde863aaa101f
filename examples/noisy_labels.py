"""Wrong labels of few classes: keep the companion in place of the model (a minute on a laptop).

    python -m examples.noisy_labels

300 of scikit-learn's digits, 30 % of them with a wrong label. The accuracies are of 1,000 others with right labels.
Which network is the better one differs from script to script: decide on validation images.
"""

from __future__ import annotations

import copy
from statistics import mean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from dcl_optim import DCLOptimizer
from dcl_optim.trial import accuracy


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels))
    x, y = images[order].float().view(-1, 1, 8, 8) / 16, labels[order]
    wrong = (y[:300] + torch.randint(1, 10, (300,))) % 10
    return x[:300], torch.where(torch.rand(300) < 0.3, wrong, y[:300]), x[300:1300], y[300:1300]


def train(seed: int) -> tuple[float, float]:
    """The test accuracies of the model and of its companion."""
    x_train, y_train, x_test, y_test = data(seed)
    layers = [Conv2dNormActivation(1, 16, stride=2), Conv2dNormActivation(16, 64, stride=2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = DCLOptimizer(base, model)
    for _ in range(100):
        for rows in torch.randperm(len(x_train)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
            optimizer.step()

    deployed = copy.deepcopy(model)  # a plain network: save its state_dict, and load it without dcl_optim
    deployed.load_state_dict(optimizer.companion.state_dict())
    test = [(x_test, y_test)]
    return accuracy(model, test), accuracy(deployed, test)


if __name__ == "__main__":
    found = [train(seed) for seed in range(5)]
    of_model, of_companion = (mean(accuracies) for accuracies in zip(*found, strict=True))
    print(f"{of_model:.1f} % of the model, {of_companion:.1f} % of its companion")
