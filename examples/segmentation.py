"""Segmentation: a class for each pixel of digits on a noisy background, with DCP and without (a minute on a laptop).

    python -m examples.segmentation

The logits are (B, K, H, W) and the labels (B, H, W), as for cross-entropy. It prints the mean accuracy of the classes.
It shows the shapes: for pixels nothing was gained, here neither.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from dcl_optim import DCPOptimizer
from dcl_optim.trial import compare

SIDE = 20


def scenes(count: int, first: int, seed: int) -> tuple[Tensor, Tensor]:
    """Put two of the 400 digits from ``first`` on into each noisy image; the class of the background is 10."""
    digits = load_digits()
    draws = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.rand(count, 1, SIDE, SIDE, generator=draws)
    labels = torch.full((count, SIDE, SIDE), 10)
    for index in range(count):
        for left in (0, SIDE // 2):
            chosen = first + int(torch.randint(400, (), generator=draws))
            top = int(torch.randint(SIDE - 8, (), generator=draws))
            digit = torch.tensor(digits.images[chosen] / 16).float()
            place = (slice(top, top + 8), slice(left, left + 8))
            images[index, 0][place] += digit
            labels[index][place][digit > 0.3] = int(digits.target[chosen])
    return images, labels


def network() -> nn.Sequential:
    layers = [Conv2dNormActivation(before, 32) for before in (1, 32, 32)]
    return nn.Sequential(*layers, nn.Conv2d(32, 11, 5, padding=2))


def train(weight: Any, seed: int, count: int = 100, epochs: int = 20) -> float:
    """Return the mean accuracy of the classes of pixels in percent; weight=0 is plain training."""
    torch.manual_seed(seed)
    x, y = scenes(count, first=0, seed=seed)
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = DCPOptimizer(base, model, weight=weight)
    for _ in range(epochs):
        for rows in torch.randperm(count).split(10):
            optimizer.zero_grad()
            z = model(x[rows])
            loss = F.cross_entropy(z, y[rows]) + optimizer.penalty(z, y[rows])
            loss.backward()
            optimizer.step()

    model.eval()
    x, y = scenes(100, first=1000, seed=1000)
    with torch.no_grad():
        is_right = model(x).argmax(1) == y
    return 100 * torch.stack([is_right[y == label].float().mean() for label in range(11)]).mean().item()


if __name__ == "__main__":
    print(compare(train, {"plain": 0, "DCP": "auto"}, seeds=3))
