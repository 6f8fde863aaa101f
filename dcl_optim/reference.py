"""Both methods in plain PyTorch, to read or to paste: the optimizers train as these loops do.

Nothing else in the package imports this file; the tests hold the optimizers against it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batches = Iterable[tuple[Tensor, Tensor]]


# --8<-- [start:distance]
def distances(z: Tensor, c: Tensor) -> Tensor:
    """The distance "mse" of each row: |z - c|² / K, linear from the radius K / √2 on."""
    norms = torch.linalg.vector_norm(z - c, dim=1)
    near = norms.clamp(max=z.shape[1] / 2**0.5)
    return near * (2 * norms - near) / z.shape[1]


# --8<-- [end:distance]
# --8<-- [start:dcp]
class Prototypes(nn.Module):
    """A running mean of the logits of each class, and the penalty toward it (Equations 5 and 6)."""

    values: Tensor  # p
    numbers: Tensor  # n: rows of each class, older ones weigh less
    right: Tensor
    labeled: Tensor

    def __init__(self, num_classes: int, weight: float | str = "auto", alpha: float = 0.97) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weight = weight
        self.alpha = alpha
        self.register_buffer("values", torch.zeros(num_classes, num_classes))
        self.register_buffer("numbers", torch.zeros(num_classes))
        self.register_buffer("right", torch.zeros(()))
        self.register_buffer("labeled", torch.zeros(()))
        self.batches: list[tuple[Tensor, Tensor]] = []  # since the last step

    def automatic_weight(self) -> Tensor:
        accuracy = (self.right / self.labeled).nan_to_num(0.0)  # of the steps before
        return (min(1.0, self.num_classes / 100) * accuracy**6).clamp(min=0.1)

    def penalty(self, logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The term: the weight times the mean distance of the rows from their prototypes."""
        z, y = logits.movedim(1, -1).flatten(0, -2), labels.flatten()
        z, y = z[y != ignore_index], y[y != ignore_index]
        if torch.is_grad_enabled():  # not in validation
            self.batches.append((z.detach(), y))
        seen = self.numbers[y] > 0  # a class without a prototype gives no penalty
        weight: Any = self.automatic_weight() if self.weight == "auto" else self.weight
        return weight * (distances(z, self.values[y]) * seen).sum() / max(len(y), 1)

    @torch.no_grad()
    def step(self) -> None:
        """Learn from the batches of this step. Call it after each step of the optimizer."""
        z, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        rows = torch.bincount(y, minlength=self.num_classes)
        self.numbers = torch.where(rows > 0, self.alpha * self.numbers + rows, self.numbers)
        self.values.index_add_(0, y, (z - self.values[y]) / self.numbers[y, None])
        self.right = 0.98 * self.right + (z.argmax(1) == y).sum()
        self.labeled = 0.98 * self.labeled + len(y)
        self.batches = []


def train_dcp(model: nn.Module, optimizer: Optimizer, prototypes: Prototypes, batches: Batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        z = model(x)
        loss = F.cross_entropy(z, y) + prototypes.penalty(z, y)  # or any other loss
        loss.backward()
        optimizer.step()
        prototypes.step()


# --8<-- [end:dcp]
# --8<-- [start:dcl]
class Companion:
    """A second network that follows the logits of the model, and the penalty toward its own."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        weight: float = 0.1,
        alpha: float = 0.99,
    ) -> None:
        self.model = model
        self.network = copy.deepcopy(model)  # ω
        self.optimizer = make_optimizer(self.network.parameters())  # as the model's
        self.weight = weight
        self.alpha = alpha
        self.has_begun = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits z of the model and c of the companion, for the same input with the same dropout masks."""
        with torch.random.fork_rng():
            c: Tensor = self.network(x)
        z: Tensor = self.model(x)
        return z, c

    def penalty(self, z: Tensor, c: Tensor) -> Tensor:
        """The term, which holds the companion constant (Equation 2)."""
        return self.weight * distances(z, c.detach()).mean()

    def step(self, z: Tensor, c: Tensor) -> None:
        """Step toward α c + (1 - α) z (Equation 4). Call it after each step of the optimizer."""
        target = torch.lerp(c, z, 1 - self.alpha).detach()
        self.optimizer.zero_grad()
        distances(c, target).mean().backward()
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        self.has_begun |= any(bool(gradient.any()) for gradient in gradients)  # a copy begins with zeros
        if self.has_begun:
            self.optimizer.step()


def train_dcl(optimizer: Optimizer, companion: Companion, batches: Batches) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        z, c = companion.forward(x)
        loss = F.cross_entropy(z, y) + companion.penalty(z, c)  # or any other loss
        loss.backward()
        optimizer.step()
        companion.step(z, c)


# --8<-- [end:dcl]
