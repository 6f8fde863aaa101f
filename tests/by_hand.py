"""Both methods written out for any training step, and the loops that train them and the optimizers by their terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, mlp, sgd

VARIANTS = ("dcl", "dcp")
EACH = pytest.mark.parametrize("variant", VARIANTS)
WEIGHT, ALPHA = 0.7, 0.4
METHOD = {"weight": WEIGHT, "alpha": ALPHA, "distance": "squared"}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class _Hand:
    """A step of the base optimizer, then one of the method, with the factor that autograd has for each term.

    In ``step(closure)`` the first evaluation is learned from; one that came before the step is the first.
    """

    def __init__(self, model: nn.Module, base: Optimizer | None = None) -> None:
        self.model, self.base = model, base or sgd(model)
        self.kept: list[tuple[Tensor, Any]] = []
        self._learns = True

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def term(self, distance: Tensor, lesson: Any) -> Tensor:
        term = WEIGHT * distance
        if self._learns:
            term.register_hook(lambda factor: self.kept.append((factor, lesson)))
        return term

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        def evaluate() -> Any:
            loss = closure()
            self._learns = False
            return loss

        self._learns = not self.kept
        self.base.step(*([] if closure is None else [evaluate]))
        self.learn()
        self.kept, self._learns = [], True

    def learn(self) -> None:
        raise NotImplementedError


class HandDCL(_Hand):
    """The companion runs beside the model, with the same random draws; ``find`` gives the logits of an output."""

    def __init__(self, model: Any, base: Any = None, companion: Any = None, find: Any = lambda output: output) -> None:
        super().__init__(model, base)
        self.companion, self._find, self._outputs = companion or copy.deepcopy(model), find, []
        self._second = sgd(self.companion)
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        self._draws = torch.get_rng_state()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        after = torch.get_rng_state()
        torch.set_rng_state(self._draws)
        self._outputs.append((self._find(output), self._find(self.companion(*args, **kwargs))))
        torch.set_rng_state(after)

    def penalty(self, z: Tensor) -> Tensor:
        (c,) = [c for output, c in self._outputs if torch.equal(output, z)]
        target = c.detach() + (1 - ALPHA) * (z.detach() - c.detach())
        return self.term(F.mse_loss(z, c.detach()), F.mse_loss(c, target))

    def learn(self) -> None:
        self._second.zero_grad()
        (sum(s.abs() * chase for s, chase in self.kept) / sum(s.abs() for s, _ in self.kept)).backward()
        self._second.step()
        self._outputs = []


class HandDCP(_Hand):
    """The prototypes are running means of the rows of each class, (K, K)."""

    prototypes = numbers = torch.empty(0)

    def penalty(self, z: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        rows, classes = z.movedim(1, -1).flatten(0, -2), z.shape[1]
        if not len(self.numbers):
            self.prototypes, self.numbers = rows.new_zeros(classes, classes), rows.new_zeros(classes)
        if labels.is_floating_point():
            shares, has_label = labels.movedim(1, -1).flatten(0, -2), torch.ones(len(rows))
        else:
            has_label = labels.flatten() != ignore_index
            shares = F.one_hot(labels.flatten() * has_label, classes) * has_label[:, None].to(rows)
        counts = (has_label > 0) & ~((shares > 0) & (self.numbers == 0)).any(1)
        apart = (rows - shares @ self.prototypes).nan_to_num(0.0, 0.0, 0.0)
        return self.term((apart.square().mean(1) * counts).sum() / has_label.sum(), (rows.detach(), shares))

    def learn(self) -> None:
        rows, shares = (torch.cat(parts) for parts in zip(*(lesson for _, lesson in self.kept), strict=True))
        for k in range(len(self.prototypes)):
            number, apart = shares[:, k].sum(), (rows - self.prototypes[k]).nan_to_num(0.0, 0.0, 0.0)
            if number > 0:
                self.numbers[k] = ALPHA * self.numbers[k] + number
                self.prototypes[k] += shares[:, k] @ apart / self.numbers[k]


def by_hand(variant: str, model: nn.Module, base: Optimizer | None = None, **options: Any) -> Any:
    return HandDCL(model, base, **options) if variant == "dcl" else HandDCP(model, base)


def wrap(variant: str, model: nn.Module, base: Optimizer | None = None, **options: Any) -> Any:
    kind = DCLOptimizer if variant == "dcl" else DCPOptimizer
    return kind(base or sgd(model), model, **(METHOD | options))


def term_of(optimizer: Any, way: str = "term") -> Callable[..., Any]:
    """The penalty of logits and labels by either method, 0 by the line.

    DCL gets ``returned``, what the model returned, where DCP gets what the script has made of it.
    """

    def term(z: Tensor, labels: Tensor, returned: Tensor | None = None, **options: Any) -> Any:
        if way == "line":
            return 0.0
        if isinstance(optimizer, (DCPOptimizer, HandDCP)):
            return optimizer.penalty(z, labels, **options)
        return optimizer.penalty(z if returned is None else returned)

    return term


def train(
    optimizer: Any,
    data: Iterable[tuple[Tensor, Tensor]],
    way: str = "term",
    loss: Any = F.multi_margin_loss,
    call: Any = None,
    compiled: Any = lambda function: function,
) -> Any:
    """The plain loop; ``call`` is what the script calls."""
    call = optimizer.model if call is None else call
    term = term_of(optimizer, way)
    criterion = compiled(lambda z, y: loss(z, y) + term(z, y))
    for x, y in data:
        optimizer.zero_grad()
        criterion(call(x), y).backward()
        optimizer.step()
    return optimizer


def train_by_closures(optimizer: Any, data: Any, loss: Any, way: str = "term") -> Any:
    term = term_of(optimizer, way)
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            z = optimizer.model(x)
            found = loss(z, y) + term(z, y)
            optimizer.zero_grad()
            found.backward()
            return found

        optimizer.step(closure)
    return optimizer


def learned(optimizer: Any) -> dict[str, Tensor]:
    """What companion or prototypes have learned."""
    if isinstance(optimizer, (DCPOptimizer, HandDCP)):
        return {"prototypes": optimizer.prototypes}
    return dict(optimizer.companion.state_dict())


def apart(variant: str, make: Any = wrap) -> Any:
    """In float32, with a companion that is not the model: the penalty is large from the start."""
    options = {"companion": mlp(3, dtype=torch.float32)} if variant == "dcl" else {}
    return make(variant, mlp(dtype=torch.float32), **options)


def end(optimizer: Any) -> list[Tensor]:
    states = dict(optimizer.model.state_dict()), learned(optimizer)
    return [torch.cat([tensor.flatten() for tensor in state.values()]) for state in states]


def assert_same_training(first: Any, second: Any, **tolerance: float) -> None:
    """Compare what two optimizers have trained: bit for bit without a tolerance."""
    assert_same(first.model, second.model, **tolerance)
    assert_same(learned(first), learned(second), **tolerance)
