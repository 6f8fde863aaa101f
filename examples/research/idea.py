"""Draw the idea: the logits of three digits without and with the line, and the prototypes that pull them together.

    python -m examples.research.idea --out idea.png

Three logits less their mean lie in a plane, so the figure shows all of them. Both networks start from the same weights
and see the same batches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from examples.research.canvas import new_figure

DIGITS = (3, 8, 9)
COLORS = ("#0072B2", "#D55E00", "#009E73")
STEPS = 400


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three quarters of scikit-learn's digits and their labels, and the others."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, train_size=0.75, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.tensor(part) for part in parts)
    return x_train.float(), y_train, x_test.float(), y_test


def of_three_digits(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images of these digits, and their classes from 0 on."""
    matches = labels[:, None] == torch.tensor(DIGITS)
    return images[matches.any(1)], matches[matches.any(1)].long().argmax(1)


def train(images: Tensor, labels: Tensor, wraps: bool) -> tuple[nn.Module, Tensor | None]:
    """Train a small network; return it, and the prototypes if there are some."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(DIGITS)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wraps:
        optimizer = DCPOptimizer(optimizer, model)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model, optimizer.prototypes if isinstance(optimizer, DCPOptimizer) else None


def in_plane(logits: Tensor) -> Tensor:
    """Coordinates (N, 2) of three logits less their mean, along two orthogonal directions of length 1."""
    directions = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]])
    return logits @ F.normalize(directions, dim=1).T


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("idea.png"))
    path: Path = parser.parse_args(arguments).out
    train_images, train_labels, test_images, test_labels = digits()
    images, labels = of_three_digits(train_images, train_labels)
    shown, classes = of_three_digits(test_images, test_labels)
    figure = new_figure(6.2, 2.9)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, wraps in zip(axes, (False, True), strict=True):
        model, prototypes = train(images, labels, wraps)
        with torch.no_grad():
            points = in_plane(model(shown))
        for k, (digit, color) in enumerate(zip(DIGITS, COLORS, strict=True)):
            x, y = points[classes == k].T
            axis.plot(x, y, "o", color=color, markersize=4, alpha=0.6, markeredgewidth=0, label=f"digit {digit}")
        if prototypes is not None:
            x, y = in_plane(prototypes).T
            axis.plot(x, y, "*", color="black", markersize=15, label="prototype")
        axis.set_title("with DCPOptimizer" if wraps else "without")
        axis.set_aspect("equal")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[1].legend(loc="upper right")
    figure.savefig(path)
    return path


if __name__ == "__main__":
    print(main())
