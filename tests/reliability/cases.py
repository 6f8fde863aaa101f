"""A random training: a network, an optimizer, the method's options and the script's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, LinearWarmup, RunningAverage, distances
from tests.reliability.networks import Base, Network, bases, networks

IGNORED = -100
Batch = tuple[Tensor, Tensor]


def huber(z: Tensor, c: Tensor) -> Tensor:
    return F.huber_loss(z, c, delta=0.3)


# The arguments that choose a distance, and what it is.
DISTANCES: dict[str, tuple[dict[str, Any], distances.Distance]] = {
    "mse": ({}, distances.mse),
    "squared": ({"distance": "squared"}, distances.squared),
    "l1": ({"distance": "l1"}, distances.l1),
    "kl": ({"distance": "kl", "temperature": 1.5}, partial(distances.kl, temperature=1.5)),
    "infonce": ({"distance": "infonce", "temperature": 0.5}, partial(distances.infonce, temperature=0.5)),
    "callable": ({"distance": huber}, huber),
}


@dataclass(frozen=True)
class Case:
    """One training; ``sizes`` are its batches' and ``rates`` multiply the learning rate, both step by step."""

    network: Network
    base: Base
    classes: int
    seed: int
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    loop: str
    parts: int
    factor: float
    factor_from: str
    weight: Any
    alpha: Any
    distance: str

    @property
    def steps(self) -> int:
        return len(self.sizes)

    def model(self) -> nn.Sequential:
        return self.network.build(self.classes, self.seed)

    def batches(self, ignored: bool = False) -> list[Batch]:
        """The batches; on request a third of the labels, but never the first, is to be left out."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for size in self.sizes:
            y = torch.randint(self.classes, (size,), generator=generator)
            out = torch.rand(size, generator=generator) < ignored / 3
            out[0] = False
            found.append((self.network.inputs(size, generator), y.masked_fill(out, IGNORED)))
        return found

    def loss(self, criterion: Callable[[Tensor, Tensor], Tensor], z: Tensor, y: Tensor) -> Tensor:
        return self.factor * criterion(z, y)

    def options(self) -> dict[str, Any]:
        """What both optimizers are given."""
        options = {"weight": self.weight, "alpha": self.alpha, **DISTANCES[self.distance][0]}
        if self.factor_from == "number":
            options["loss_scale"] = self.factor / self.parts
        return options

    def weight_at(self, step: int) -> float:
        """What the penalty is multiplied by in step number ``step``, counted from 1."""
        return self.factor * (self.weight(step) if callable(self.weight) else self.weight)

    def alpha_at(self, step: int) -> float:
        return self.alpha(step) if callable(self.alpha) else self.alpha


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Multiply the learning rates that an optimizer began with."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate


class Script:
    """A case's training script around any optimizer, which can be stopped after a step and go on."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module) -> None:
        self.case, self.model, self.optimizer, self.criterion = case, model, optimizer, criterion
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (*case.rates, 1.0)[step])

    def run(self, batches: list[Batch]) -> None:
        for x, y in batches:
            if self.case.loop == "plain":
                self._gradients(x, y)
                self.optimizer.step()
            else:
                self.optimizer.step(partial(self._gradients if self.case.loop == "closure" else self._loss, x, y))
            self.scheduler.step()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.optimizer, DCPOptimizer):
            self.optimizer.set_targets(y)
        return self.case.loss(self.criterion, self.model(x), y) / self.case.parts

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for part in zip(x.chunk(self.case.parts), y.chunk(self.case.parts), strict=True):
            loss = self._loss(*part)
            loss.backward()
            total = total + loss.detach()
        return total


def wrapped(case: Case, variant: str, **more: Any) -> Script:
    """The case's script with the optimizer around its base."""
    model, criterion = case.model(), nn.CrossEntropyLoss()
    base, options = case.base.build(model), case.options() | more
    optimizer = (
        DCLOptimizer(base, model, **options) if variant == "dcl" else DCPOptimizer(base, model, case.classes, **options)
    )
    return Script(case, model, optimizer, criterion)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    network, distance = draw(networks()), draw(st.sampled_from(sorted(DISTANCES)))
    splits = network.rows_are_independent and distance != "infonce"
    parts = draw(st.sampled_from([1, 2])) if splits else 1
    least = 2 if network.norm == "batch" else 1
    sizes = draw(st.lists(st.integers(least, 6), min_size=2, max_size=8))
    classes = draw(st.integers(2, 6))
    # Of a single row with two classes the factor cannot be read off.
    # Two classes are read only if the rows differ enough in the predicted share, which some of these do not.
    sources = ["number"] + ["gradient"] * (classes > 2)
    return Case(
        network=network,
        base=draw(bases),
        classes=classes,
        seed=draw(st.integers(0, 10_000)),
        sizes=tuple(parts * size for size in sizes),
        rates=tuple(draw(st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=len(sizes), max_size=len(sizes)))),
        loop=draw(st.sampled_from(["plain", "closure"] + ["lazy closure"] * (parts == 1))),
        parts=parts,
        factor=draw(st.sampled_from([1.0, 8.0, 0.25])),
        factor_from=draw(st.sampled_from(sources)),
        weight=draw(st.sampled_from([0.1, 0.5, 2.0, LinearWarmup(1.0, 4)])),
        alpha=draw(st.sampled_from([0.0, 0.4, 0.6, 0.97, 1.0, RunningAverage()])),
        distance=distance,
    )
