"""A random training: a network, an optimizer, the method's options and the script's loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from tests.adversary.networks import Base, Network, bases, networks
from tests.helpers import huber, linear_growth, running_average
from tests.reference import dcl_step, dcp_step

IGNORED = -100


NAMED = {"mse": distances.mse, "squared": distances.squared, "l1": distances.l1}
GIVEN = {
    "kl": partial(distances.kl, temperature=1.5),
    "infonce": partial(distances.infonce, temperature=0.5),
    "callable": huber,
}


@dataclass(frozen=True)
class Case:
    """One training; ``sizes`` are its batches' and ``rates`` multiply the learning rate, both step by step.

    ``way`` is "line" or "term".
    """

    network: Network
    base: Base
    classes: int
    seed: int
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    factor: float
    way: str
    weight: Any
    alpha: Any
    distance: str

    def model(self):
        return self.network.build(self.classes, self.seed)

    def batches(self, ignored=False):
        """The batches; on request a third of the labels, but never the first, is to be left out."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for size in self.sizes:
            y = torch.randint(self.classes, (size,), generator=generator)
            out = torch.rand(size, generator=generator) < ignored / 3
            out[0] = False
            found.append((self.network.inputs(size, generator), y.masked_fill(out, IGNORED)))
        return found

    def loss(self, z, y):
        return self.factor * F.cross_entropy(z, y)

    def options(self):
        """What both optimizers are given."""
        distance = GIVEN.get(self.distance, self.distance)
        return {"weight": self.weight, "alpha": self.alpha, "distance": distance}

    @property
    def by_rows(self):
        return (NAMED | GIVEN)[self.distance]

    def weight_at(self, step):
        """What the penalty is multiplied by in step number ``step``, counted from 1."""
        return self.factor * (self.weight(step) if callable(self.weight) else self.weight)

    def alpha_at(self, step):
        return self.alpha(step) if callable(self.alpha) else self.alpha


def set_rates(optimizer, rate):
    """Multiply the learning rates that an optimizer began with."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate


def wrapped(case, variant, **more):
    """The case's model, and the optimizer around its base."""
    model = case.model()
    base, options = case.base.build(model), case.options() | more
    if variant == "dcl":
        return model, DCLOptimizer(base, model, **options, companion_fraction=1)
    # As many random labels as classes may be the rows' places.
    return model, DCPOptimizer(base, model, num_classes=case.classes, **options)


def learned(optimizer):
    """What the forecaster knows."""
    companion = isinstance(optimizer, DCLOptimizer)
    return list(optimizer.companion.state_dict().values()) if companion else list(optimizer.prototypes)


class Literal:
    """A case's training by the written-out algorithm, which takes each batch whole; ``options`` are the optimizer's."""

    def __init__(self, case, variant, **options):
        self.case, self.variant, self.options, self.steps = case, variant, options, 0
        self.model, self.companion = case.model(), case.model()
        lr_scale = options.get("companion_lr_scale", 1.0)
        self.optimizers = case.base.build(self.model), case.base.build(self.companion, lr_scale)
        self.prototypes = {}
        self.numbers = None if options.get("update") == "batch" else {}

    def step(self, x, y, rate):
        self.steps += 1
        for optimizer in self.optimizers:
            set_rates(optimizer, rate)
        functions = (self.case.loss, self.case.by_rows)
        settings = {"weight": self.case.weight_at(self.steps), "alpha": self.case.alpha_at(self.steps)}
        if self.variant == "dcl":
            dcl_step(self.model, self.companion, *self.optimizers, x, y, *functions, **settings)
            return
        labelled = y != IGNORED
        of_labelled = lambda x: self.model(x)[labelled]  # noqa: E731
        settings["numbers"] = self.numbers
        dcp_step(of_labelled, self.prototypes, self.optimizers[0], x, y[labelled], *functions, **settings)

    def forward(self, x):
        """Random draws and the statistics of batch norm, where no step follows."""
        random = torch.get_rng_state()
        for network in (self.companion, self.model):
            torch.set_rng_state(random)
            network(x)

    def learned(self):
        if self.variant == "dcl":
            return list(self.companion.state_dict().values())
        unseen = torch.zeros(self.case.classes, dtype=torch.float64)
        return [self.prototypes.get(k, unseen) for k in range(self.case.classes)]


@st.composite
def cases(draw):
    network, way = draw(networks()), draw(st.sampled_from(["line", "term"]))
    distance = draw(st.sampled_from(sorted(NAMED | GIVEN)))
    # Of two classes, and of single rows, a gradient tells too little.
    least = 3 if way == "line" else 2 if network.norm == "batch" else 1
    sizes = draw(st.lists(st.integers(least, 8), min_size=2, max_size=8))
    return Case(
        network=network,
        base=draw(bases),
        classes=draw(st.integers(3 if way == "line" else 2, 6)),
        seed=draw(st.integers(0, 10_000)),
        sizes=tuple(sizes),
        rates=tuple(draw(st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=len(sizes), max_size=len(sizes)))),
        factor=draw(st.sampled_from([1.0, 8.0, 0.25])),
        way=way,
        weight=draw(st.sampled_from([0.1, 0.5, 2.0, partial(linear_growth, steps=4)])),
        alpha=draw(st.sampled_from([0.0, 0.4, 0.6, 0.97, 1.0, running_average])),
        distance=distance,
    )
