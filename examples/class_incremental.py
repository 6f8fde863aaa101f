"""Class-incremental digits: five tasks of two classes, with a head that is masked or grows (minutes on a laptop).

    python -m examples.class_incremental --seeds 10

Each task trains on its own images and on 10 of each class before. It prints the accuracy on all ten classes, and what
DCP and DCL add. A masked head has ten logits, of which those of later tasks are closed. A growing one gets two logits
more for each task, so base optimizer and wrapper are built again. With a masked head the companion has a mask of its
own: "DCL" calls reset_companion() when classes open, "DCL, old mask" does not, which is warned of.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer

HEADS = ("-inf", "-10000", "-1000", "adds -10000", "adds -1000", "grows")
METHODS = ("plain", "DCP", "DCL", "DCL, old mask")
REPLAYED = 10  # images of each earlier class


class Network(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.head, self.kind = nn.Linear(128, 2 if head == "grows" else 10), head
        self.register_buffer("closed", torch.ones(10, dtype=torch.bool))

    def open(self, task: int) -> None:
        self.closed[: 2 * task + 2] = False
        if self.kind == "grows" and task:
            old, self.head = self.head, nn.Linear(128, 2 * task + 2)
            self.head.weight.data[: 2 * task] = old.weight.data
            self.head.bias.data[: 2 * task] = old.bias.data

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.body(x))
        if self.kind == "grows":
            return z
        number = float(self.kind.removeprefix("adds "))
        return z + self.closed * number if "adds" in self.kind else z.masked_fill(self.closed, number)


def wrap(method: str, model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return base if method == "plain" else (DCPOptimizer if method == "DCP" else DCLOptimizer)(base, model)


def train(head: str, method: str, seed: int, epochs: int = 10) -> float:
    """Return the test accuracy in percent on all ten classes after the fifth task."""
    found = load_digits(return_X_y=True)
    parts = train_test_split(*found, train_size=0.7, stratify=found[1], random_state=seed)
    x, x_test, y, y_test = map(torch.as_tensor, parts)
    x, x_test = x.float() / 16, x_test.float() / 16
    torch.manual_seed(seed)
    model = Network(head)
    optimizer = wrap(method, model)
    for task in range(5):
        model.open(task)
        if task and head == "grows":
            optimizer = wrap(method, model)
        elif task and method == "DCL":
            optimizer.reset_companion()
        earlier = [(y == k).nonzero()[:REPLAYED, 0] for k in range(2 * task)]
        rows = torch.cat([(y // 2 == task).nonzero()[:, 0], *earlier])
        for _ in range(epochs):
            for batch in rows[torch.randperm(len(rows))].split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    warnings.filterwarnings("ignore", "the companion's logits are masked")
    print(f"{'head':12}" + "".join(f"{method:>18}" for method in METHODS))
    for head in HEADS:
        plain, *others = ([train(head, method, seed) for seed in seeds] for method in METHODS)
        row = f"{head:12}{statistics.mean(plain):18.1f}"
        for accuracies in others:
            gains = [one - other for one, other in zip(accuracies, plain, strict=True)]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
            row += f"{statistics.mean(gains):+12.2f} ± {error:.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
