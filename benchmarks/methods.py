"""One training step of every method that is compared, as a callable without arguments."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.models import CLASSES, Batches
from dcl_optim import DCLOptimizer, DCPOptimizer

WEIGHT, ALPHA = 1.0, 0.6


def _nothing() -> list[Tensor]:
    return []


@dataclass
class Training:
    """A model in training by one method, ready to take steps and to be weighed.

    Attributes:
        step: one training step.
        model: what it trains.
        optimizers: every optimizer that holds state, the model's own first.
        companion: the second network, where the method has one.
        others: further tensors that the method keeps from step to step.
    """

    step: Callable[[], None]
    model: nn.Module
    optimizers: list[Optimizer]
    companion: nn.Module | None = None
    others: Callable[[], list[Tensor]] = field(default=_nothing)

    def memory(self) -> dict[str, int]:
        """Count what stays allocated between steps; meaningful once a step has made the optimizers' state."""
        companion = self.companion
        parameters = list(companion.parameters()) if companion is not None else []
        buffers = list(companion.buffers()) if companion is not None else []
        state = [_bytes(_tensors(dict(optimizer.state))) for optimizer in self.optimizers]
        return {
            "parameters_added": sum(p.numel() for p in parameters),
            "parameter_bytes_added": _bytes(parameters),
            "other_bytes_added": _bytes(buffers) + _bytes(self.others()),
            "optimizer_state_bytes": sum(state),
            "optimizer_state_bytes_added": sum(state[1:]),
        }


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def sgd(parameters: Iterable[nn.Parameter]) -> SGD:
    """The base optimizer of every method; the rate is low so that noise with random labels stays finite."""
    return SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


def _loop(
    model: nn.Module, optimizer: Optimizer, batches: Batches, criterion: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], None]:
    """The loop of any script; every method but the handwritten one runs this very code."""
    endless = itertools.cycle(batches)

    def step() -> None:
        x, y = next(endless)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def plain(model: nn.Module, batches: Batches) -> Training:
    """SGD alone."""
    optimizer = sgd(model.parameters())
    return Training(_loop(model, optimizer, batches, F.cross_entropy), model, [optimizer])


def handwritten(model: nn.Module, batches: Batches) -> Training:
    """Deep Companion Learning written into the loop by someone who knows it: what the wrapper must not exceed."""
    companion = copy.deepcopy(model)
    optimizer, companion_optimizer = sgd(model.parameters()), sgd(companion.parameters())
    endless = itertools.cycle(batches)

    def step() -> None:
        x, y = next(endless)
        z, c = model(x), companion(x)
        optimizer.zero_grad()
        loss = F.cross_entropy(z, y) + WEIGHT * F.mse_loss(z, c.detach())
        loss.backward()
        optimizer.step()
        companion_optimizer.zero_grad()
        chase = F.mse_loss(c, ALPHA * c.detach() + (1 - ALPHA) * z.detach())
        chase.backward()
        companion_optimizer.step()

    return Training(step, model, [optimizer, companion_optimizer], companion)


def companion_learning(model: nn.Module, batches: Batches, fraction: float = 1.0) -> Training:
    """The same by wrapping the optimizer."""
    optimizer = DCLOptimizer(sgd(model.parameters()), model, weight=WEIGHT, alpha=ALPHA, companion_fraction=fraction)
    step = _loop(model, optimizer, batches, F.cross_entropy)
    return Training(step, model, [optimizer.base, optimizer.companion_optimizer], optimizer.companion)


def companion_learning_on_a_tenth(model: nn.Module, batches: Batches) -> Training:
    """The companion learns from a tenth of each batch; the penalty covers all of it."""
    return companion_learning(model, batches, fraction=0.1)


def companion_prototype(model: nn.Module, batches: Batches) -> Training:
    """Class prototypes in the companion's place."""
    criterion = nn.CrossEntropyLoss()
    optimizer = DCPOptimizer(sgd(model.parameters()), model, CLASSES, weight=WEIGHT, alpha=ALPHA, criterion=criterion)

    def kept() -> list[Tensor]:
        return list(_tensors(optimizer.forecaster.state_dict()))

    return Training(_loop(model, optimizer, batches, criterion), model, [optimizer.base], others=kept)


METHODS: dict[str, Callable[[nn.Module, Batches], Training]] = {
    "plain": plain,
    "handwritten": handwritten,
    "DCLOptimizer": companion_learning,
    "DCLOptimizer fraction 10 %": companion_learning_on_a_tenth,
    "DCPOptimizer": companion_prototype,
}


def start(method: str, model: nn.Module, batches: Batches, warm_up: int = 2) -> Training:
    """Set a method up and take its first steps, which allocate what later ones reuse."""
    training = METHODS[method](model.train(), batches)
    for _ in range(warm_up):
        training.step()
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise RuntimeError(f"{method} diverged while warming up: its times would mean nothing")
    return training
