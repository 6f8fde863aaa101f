"""What the tests of distillation share: small networks, drawn numbers, formulas in loops."""

from __future__ import annotations

import math

import torch

from examples.research.applications.distillation import methods, stages

SHAPE = (1, 8, 8)
PAIRS = [("resnet10-s", "resnet10-xs"), ("resnet10-xs", "resnet10-s"), ("resnet8x4", "resnet8x4")]
TAUGHT = [name for name in methods.NAMES if name != "plain"]


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits():
    return drawn(6, 5, scale=3), drawn(6, 5, seed=1, scale=3), torch.tensor([0, 4, 2, 2, 1, 3])


def softmax(row, temperature):
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def network(name="resnet10-xs", seed=0, shape=SHAPE):
    """A network whose batch norm has seen data, so that evaluation and training differ."""
    torch.manual_seed(seed)
    built = stages.build(name, 5, shape)
    built(2 * torch.randn(8, *shape) + 1)
    return built


def method(name, teacher="resnet10-s", student="resnet10-xs"):
    return methods.make(name, stages.cut(network(student)), stages.cut(network(teacher, seed=1)), SHAPE)


def batch(count=12):
    return drawn(count, *SHAPE, seed=3), torch.arange(count) % 5
