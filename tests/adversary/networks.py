"""Random small networks and optimizers, as hypothesis strategies and as what they describe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import nn

FEATURES, SIDE = 4, 4
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "leaky": nn.LeakyReLU}
# With torch's epsilons of 1e-8 and less, rounding errors in gradients that are truly zero, as of a bias before batch
# norm, move parameters as far as gradients do.
EPSILON = 1e-5
# Options beside the learning rate and the weight decay.
BASES = {
    "SGD": (torch.optim.SGD, 0.05),
    "SGD momentum": (partial(torch.optim.SGD, momentum=0.9, dampening=0.1), 0.02),
    "SGD nesterov": (partial(torch.optim.SGD, momentum=0.8, nesterov=True), 0.02),
    "Adam": (partial(torch.optim.Adam, eps=EPSILON), 0.01),
    "Adam amsgrad": (partial(torch.optim.Adam, amsgrad=True, betas=(0.8, 0.99), eps=EPSILON), 0.01),
    "AdamW": (partial(torch.optim.AdamW, eps=EPSILON), 0.01),
    "Adamax": (partial(torch.optim.Adamax, eps=EPSILON), 0.01),
    "NAdam": (partial(torch.optim.NAdam, eps=EPSILON), 0.01),
    "RAdam": (partial(torch.optim.RAdam, eps=EPSILON), 0.01),
    "RMSprop": (partial(torch.optim.RMSprop, eps=EPSILON), 0.005),
    "RMSprop centered": (partial(torch.optim.RMSprop, centered=True, momentum=0.5, eps=EPSILON), 0.005),
    "Adagrad": (partial(torch.optim.Adagrad, eps=EPSILON), 0.02),
    "Adadelta": (partial(torch.optim.Adadelta, eps=EPSILON), 0.5),
    "ASGD": (partial(torch.optim.ASGD, t0=2), 0.05),
}


@dataclass(frozen=True)
class Network:
    """A perceptron or convolutions; ``frozen`` are numbers of hidden layers, the last layer always trains."""

    convolutions: bool
    widths: tuple[int, ...]
    activation: str
    norm: str
    dropout: float
    tied: bool
    frozen: frozenset[int]

    @property
    def rows_are_independent(self):
        """Whether a batch may be split without changing what is computed."""
        return self.norm != "batch" and self.dropout == 0

    def inputs(self, rows, generator):
        shape = (rows, 1, SIDE, SIDE) if self.convolutions else (rows, FEATURES)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def build(self, classes, seed):
        torch.manual_seed(seed)
        channels, layers, affine = 1 if self.convolutions else FEATURES, [], []
        for width in self.widths:
            affine.append(self._affine(channels, width))
            layers += [affine[-1], *self._after(width)]
            channels = width
        if self.tied:
            pair = [self._affine(channels, channels) for _ in range(2)]
            pair[1].weight = pair[0].weight
            layers += [pair[0], ACTIVATIONS[self.activation](), pair[1]]
        for number in self.frozen:
            affine[number].requires_grad_(False)
        if self.convolutions:
            layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
            channels *= 4
        return nn.Sequential(*layers, nn.Linear(channels, classes)).double()

    def _affine(self, inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1) if self.convolutions else nn.Linear(inputs, outputs)

    def _after(self, width):
        norms = {
            "none": [],
            "batch": [nn.BatchNorm2d(width) if self.convolutions else nn.BatchNorm1d(width)],
            "layer": [nn.GroupNorm(1, width) if self.convolutions else nn.LayerNorm(width)],
        }
        return [*norms[self.norm], ACTIVATIONS[self.activation](), *([nn.Dropout(self.dropout)] * (self.dropout > 0))]


@dataclass(frozen=True)
class Base:
    """An optimizer of torch's; with two groups the second has half of the rate and no weight decay."""

    name: str
    weight_decay: float
    two_groups: bool
    foreach: bool | None

    def build(self, model, rate=1.0):
        """Build it over a model's parameters, with its learning rates multiplied by ``rate``."""
        make, lr = BASES[self.name]
        parameters, lr = list(model.parameters()), lr * rate
        groups = [{"params": parameters[::2]}]
        if self.two_groups:
            groups.append({"params": parameters[1::2], "lr": lr / 2, "weight_decay": 0.0})
        else:
            groups[0]["params"] += parameters[1::2]
        return make(groups, lr=lr, weight_decay=self.weight_decay, foreach=self.foreach)


@st.composite
def networks(draw):
    norm = draw(st.sampled_from(["none", "batch", "layer"]))
    # Layer norm of a single feature is a constant, whose gradient is nothing but rounding errors.
    widths = tuple(draw(st.lists(st.integers(2 if norm == "layer" else 1, 8), max_size=3)))
    return Network(
        convolutions=draw(st.booleans()),
        widths=widths,
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        norm=norm,
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        tied=draw(st.booleans()),
        frozen=frozenset(draw(st.sets(st.integers(0, len(widths) - 1), max_size=2))) if widths else frozenset(),
    )


bases = st.builds(
    Base,
    name=st.sampled_from(sorted(BASES)),
    weight_decay=st.sampled_from([0.0, 1e-3, 0.1]),
    two_groups=st.booleans(),
    foreach=st.sampled_from([None, True, False]),
)
