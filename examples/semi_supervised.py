"""Semi-supervised: FixMatch with 40 labels of scikit-learn's digits, with DCP and without (seconds on a laptop).

    python -m examples.semi_supervised

One forward pass has labelled and unlabelled images. The penalty is a term of the labelled rows. It prints the accuracy.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dcl_optim import DCPOptimizer

SURE = 0.95  # the probability from which a guess is taken for a label


def digits(seed: int, per_class: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give images and labels with ``per_class`` of each class first, and those for the test."""
    found = load_digits()
    x, y = torch.tensor(found.images / 16).float().unsqueeze(1), torch.tensor(found.target)
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    training, test = shuffled[:1000], shuffled[1000:]
    labelled = torch.cat([training[y[training] == label][:per_class] for label in range(10)])
    rest = training[~torch.isin(training, labelled)]
    training = torch.cat([labelled, rest])
    return x[training], y[training], x[test], y[test]


def weak(x: Tensor) -> Tensor:
    """Move all images of the batch by at most a pixel."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return x.roll((down, right), dims=(2, 3))


def strong(x: Tensor) -> Tensor:
    """Move them, and hide a quarter of each image."""
    hidden = torch.rand(len(x), 1, 4, 4) < 0.25
    return weak(x).masked_fill(hidden.repeat_interleave(2, 2).repeat_interleave(2, 3), 0.5)


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def train(weight: float | Literal["auto"], seed: int, steps: int = 500) -> float:
    """Return the test accuracy in per cent; weight=0 is FixMatch alone."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits(seed)
    count = 40
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    optimizer = DCPOptimizer(base, model, weight=weight)
    for _ in range(steps):
        rows, unlabelled = torch.randint(count, (20,)), torch.randint(count, len(x), (60,))
        images = torch.cat([weak(x[rows]), weak(x[unlabelled]), strong(x[unlabelled])])
        optimizer.zero_grad()
        z, of_weak, of_strong = model(images).split([20, 60, 60])
        probability, guess = of_weak.detach().softmax(1).max(1)
        by_row = F.cross_entropy(of_strong, guess, reduction="none")
        loss = F.cross_entropy(z, y[rows]) + (by_row * (probability > SURE)).mean()
        (loss + optimizer.penalty(z, y[rows])).backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


def main() -> None:
    print("seed   without      with")
    for seed in range(3):
        print(f"{seed:4} {train(0, seed):9.2f} {train('auto', seed):9.2f}", flush=True)


if __name__ == "__main__":
    main()
