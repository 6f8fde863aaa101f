"""Both methods written out for any training step: what ``optimizer.penalty(...)`` is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, sgd

METHOD = {"weight": 0.7, "alpha": 0.4, "distance": "squared"}
WEIGHT, ALPHA = 0.7, 0.4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
VARIANTS = ("dcl", "dcp")


def wrap(variant: str, model: nn.Module, base: Optimizer | None = None, **options: Any) -> Any:
    kind = DCLOptimizer if variant == "dcl" else DCPOptimizer
    return kind(base or sgd(model), model, **(METHOD | options))


def term_of(optimizer: Any, way: str = "term") -> Callable[..., Any]:
    """The penalty of logits and labels by either method; by the line, the loss has no term.

    DCL gets ``returned``, what the model returned, where DCP gets what the script has made of it.
    """

    def term(z: Tensor, labels: Tensor, returned: Tensor | None = None, **options: Any) -> Any:
        if way == "line":
            return 0.0
        if isinstance(optimizer, (DCPOptimizer, HandDCP)):
            return optimizer.penalty(z, labels, **options)
        return optimizer.penalty(z if returned is None else returned)

    return term


def learned(optimizer: Any) -> dict[str, Tensor]:
    """What companion or prototypes have learned."""
    if isinstance(optimizer, (DCPOptimizer, HandDCP)):
        return {"prototypes": optimizer.prototypes}
    return dict(optimizer.companion.state_dict())


def assert_same_training(first: Any, second: Any, **tolerance: float) -> None:
    """Compare what two optimizers have trained: bit for bit without a tolerance."""
    assert_same(first.model, second.model, **tolerance)
    assert_same(learned(first), learned(second), **tolerance)


class _Hand:
    """A step of the base optimizer, then one of the method, with the factor of each term as autograd has it.

    In ``step(closure)`` the first evaluation is learned from; one that came before the step is the first.
    """

    def __init__(self, model: nn.Module, base: Optimizer | None = None) -> None:
        self.model, self.base = model, base or sgd(model)
        self._kept: list[tuple[Tensor, Any]] = []
        self._learning = True

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def _term(self, distance: Tensor, lesson: Any) -> Tensor:
        term = WEIGHT * distance
        if self._learning:
            term.register_hook(lambda factor: self._kept.append((factor, lesson)))
        return term

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is None:
            self.base.step()
        else:
            self._learning = not self._kept

            def evaluate() -> Any:
                loss = closure()
                self._learning = False
                return loss

            self.base.step(evaluate)
        self._learn()
        self._kept, self._learning = [], True

    def _learn(self) -> None:
        raise NotImplementedError


class HandDCL(_Hand):
    """The companion runs beside the model on the same input with the same random draws.

    Args:
        model, base: the network, and its optimizer; None for SGD.
        companion: where the companion starts; None for a copy.
        find: function of the model's output that returns the logits.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer | None = None,
        companion: nn.Module | None = None,
        find: Callable[[Any], Tensor] = lambda output: output,
    ) -> None:
        super().__init__(model, base)
        self.companion, self._find = companion or copy.deepcopy(model), find
        self._second = sgd(self.companion)
        self._outputs: list[tuple[Tensor, Tensor]] = []
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any) -> None:
        self._draws = torch.get_rng_state()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        after = torch.get_rng_state()
        torch.set_rng_state(self._draws)
        self._outputs.append((self._find(output), self._find(self.companion(*args))))
        torch.set_rng_state(after)

    def penalty(self, z: Tensor) -> Tensor:
        (c,) = [c for output, c in self._outputs if output is z]
        target = c.detach() + (1 - ALPHA) * (z.detach() - c.detach())
        return self._term(F.mse_loss(z, c.detach()), F.mse_loss(c, target))

    def _learn(self) -> None:
        factors = [factor.abs() for factor, _ in self._kept]
        self._second.zero_grad()
        (sum(factor * chase for factor, (_, chase) in zip(factors, self._kept, strict=True)) / sum(factors)).backward()
        self._second.step()
        self._outputs = []


class HandDCP(_Hand):
    """The prototypes: running means of the rows of each class, (K, K)."""

    def __init__(self, model: nn.Module, base: Optimizer | None = None) -> None:
        super().__init__(model, base)
        self.prototypes = self._numbers = torch.empty(0)

    def penalty(self, z: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        rows, classes = z.movedim(1, -1).flatten(0, -2), z.shape[1]
        if not len(self.prototypes):
            self.prototypes, self._numbers = rows.new_zeros(classes, classes), rows.new_zeros(classes)
        if labels.is_floating_point():
            shares = labels.movedim(1, -1).flatten(0, -2)
            number = len(rows)
        else:
            has_label = labels.flatten() != ignore_index
            shares = F.one_hot(labels.flatten() * has_label, classes) * has_label[:, None].to(rows)
            number = max(int(has_label.sum()), 1)
        counts = (shares.sum(1) > 0.5) & ~((shares > 0) & (self._numbers == 0)).any(1)
        apart = (rows - shares @ self.prototypes).nan_to_num(0.0, 0.0, 0.0)
        return self._term((apart.square().mean(1) * counts).sum() / number, (rows.detach(), shares))

    def _learn(self) -> None:
        rows, shares = (torch.cat(parts) for parts in zip(*(lesson for _, lesson in self._kept), strict=True))
        for k in range(len(self.prototypes)):
            number = shares[:, k].sum()
            if number > 0:
                apart = (rows - self.prototypes[k]).nan_to_num(0.0, 0.0, 0.0)
                self._numbers[k] = ALPHA * self._numbers[k] + number
                self.prototypes[k] += (shares[:, k, None] * apart).sum(0) / self._numbers[k]


def by_hand(variant: str, model: nn.Module, base: Optimizer | None = None, **options: Any) -> Any:
    return HandDCL(model, base, **options) if variant == "dcl" else HandDCP(model, base)
