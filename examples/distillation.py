"""Distillation: a small student learns from a teacher and from labels, with DCP and without (seconds on a laptop).

    python -m examples.distillation

The penalty is a term beside the two losses. It prints the student's accuracy on scikit-learn's digits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from dcl_optim.trial import accuracy, compare

TEMPERATURE = 4.0


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    parts = train_test_split(images, labels, train_size=1000, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, parts)
    return x_train, x_test, y_train, y_test


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def from_teacher(z: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of Hinton et al. (2015), whose gradient does not shrink with the temperature."""
    log_p = F.log_softmax(z / TEMPERATURE, dim=1)
    log_q = F.log_softmax(teacher / TEMPERATURE, dim=1)
    return TEMPERATURE**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def teach(epochs: int = 20) -> nn.Sequential:
    """Train the teacher on all training images."""
    torch.manual_seed(0)
    x, _, y, _ = digits()
    model = mlp(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.requires_grad_(False).eval()


def distill(teacher: nn.Module, weight: Any, seed: int, epochs: int = 40) -> float:
    """Return the test accuracy in percent of a student of 100 images; weight=0 is distillation alone."""
    torch.manual_seed(seed)
    x_train, x_test, y_train, y_test = digits()
    x, y = x_train[100 * seed :][:100], y_train[100 * seed :][:100]
    student = mlp(32)
    base = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    optimizer = DCPOptimizer(base, student, weight=weight)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(20):
            optimizer.zero_grad()
            z = student(x[rows])
            loss = F.cross_entropy(z, y[rows]) + from_teacher(z, teacher(x[rows]))
            (loss + optimizer.penalty(z, y[rows])).backward()
            optimizer.step()
    return accuracy(student, [(x_test, y_test)])


if __name__ == "__main__":
    print(compare(partial(distill, teach()), {"distillation": 0, "with DCP": "auto"}, seeds=5))
