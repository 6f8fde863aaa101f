"""Class prototypes beside a companion, and variants of them, written out: DCPOptimizer has no option for these."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import distances
from examples.paper.methods.base import check_range

UPDATES = ("batch", "batch means", "weights by class")


def squared(z: Tensor, c: Tensor) -> Tensor:
    """The mean squared distance of each row."""
    return (z - c).square().mean(1)


class Prototypes(nn.Module):
    r"""Class prototypes :math:`p^k` and their penalty.

    .. math:: \frac{\lambda}{N} \sum_i w_i\,\delta(z_i, p^{y_i})

    A class has no penalty before its first mean is its prototype. With soft labels a row is held to the mixture of
    their prototypes, and counts with its share in the mean of a class.

    Args:
        classes: K.
        weight: :math:`\lambda \ge 0`, or a function that returns it.
        alpha: :math:`\alpha \in [0, 1]`.
        update: ``"batch"`` for the paper's :math:`p^k \leftarrow \alpha\,p^k + (1-\alpha)\,\mathrm{mean}_k(z)`;
            ``"batch means"`` for debiased running means of batch means, :math:`n \leftarrow \alpha n + 1`;
            ``"weights by class"`` for DCPOptimizer's running means of rows, and :math:`w_i = \max(0.1, a_k^6)` with the
            accuracy :math:`a_k` on the rows of their class, a running mean of the same decay. Else :math:`w_i = 1`.
        distance: :math:`\delta`, DCPOptimizer's.

    Raises:
        ValueError: an argument out of range.
    """

    values: Tensor  # p, (K, K)
    numbers: Tensor  # n, (K,); 0 for a class not seen
    right: Tensor  # rows that were classified right, (K,)

    def __init__(
        self,
        classes: int,
        weight: float | Callable[[], float] = 1.0,
        alpha: float = 1.0,
        update: str = "batch",
        distance: str | Callable[[Tensor, Tensor], Tensor] = "squared",
    ) -> None:
        if update not in UPDATES:
            raise ValueError(f"prototypes={update!r} is unknown; choose one of {', '.join(UPDATES)}")
        if not callable(weight):
            check_range("weight", weight, 0)
        check_range("alpha", alpha, 0, 1)
        super().__init__()
        if isinstance(distance, str):
            distance = squared if distance == "squared" else getattr(distances, distance)
        self._weight, self._alpha, self._update, self._distance = weight, alpha, update, distance
        self._learns = True
        self.register_buffer("values", torch.zeros(classes, classes))
        self.register_buffer("numbers", torch.zeros(classes))
        self.register_buffer("right", torch.zeros(classes))

    def fix(self, values: Tensor) -> None:
        """Take these prototypes and keep them."""
        self.values.copy_(values)
        self.numbers.fill_(1.0)
        self._learns = False

    def penalty(self, z: Tensor, target: Tensor) -> Tensor | float:
        """The term of the loss, for class indices (N,) or distributions (N, K)."""
        weight = self._weight() if callable(self._weight) else self._weight
        if not weight:
            return 0.0
        shares = self._shares(target)
        unknown = ((shares > 0) & (self.numbers == 0)).any(1)
        weights = (~unknown).to(z)
        if self._update == "weights by class":
            accuracy = self.right / self.numbers.clamp(min=1e-6)
            weights = weights * (shares @ accuracy.pow(6).clamp(min=0.1, max=1.0))
        return weight * (weights * self._distance(z, shares @ self.values)).mean()

    @torch.no_grad()
    def learn(self, z: Tensor, target: Tensor) -> None:
        """Follow the logits of a step, once a step."""
        if not self._learns:
            return
        shares = self._shares(target)
        counts = shares.sum(0)
        if self._update == "weights by class":
            hits = shares.T @ (z.argmax(1) == shares.argmax(1)).to(shares)
            numbers = self._alpha * self.numbers + counts
            self.right.copy_(torch.where(counts > 0, self._alpha * self.right + hits, self.right))
            rate = counts / numbers.clamp(min=1e-6)
        elif self._update == "batch means":
            numbers = self._alpha * self.numbers + 1.0
            rate = 1.0 / numbers
        else:
            numbers = torch.ones_like(counts)
            rate = torch.where(self.numbers > 0, 1.0 - self._alpha, numbers)
        means = (shares.T @ z) / counts.clamp(min=1e-6)[:, None]
        seen = counts > 0
        self.values.copy_(torch.where(seen[:, None], torch.lerp(self.values, means, rate[:, None]), self.values))
        self.numbers.copy_(torch.where(seen, numbers, self.numbers))

    def _shares(self, target: Tensor) -> Tensor:
        """The labels as distributions, (N, K)."""
        return (target if target.ndim == 2 else F.one_hot(target, len(self.values))).to(self.values)
