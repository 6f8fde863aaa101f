"""What the tests of distillation share: small networks, drawn numbers, formulas in loops."""

from __future__ import annotations

import math

import torch

from examples.research.applications.distillation import methods, stages
from examples.research.applications.distillation.training import Settings

CPU = torch.device("cpu")
SHAPE = (1, 8, 8)
TINY = Settings(
    data="digits", train_size=100, teacher="small-cnn-half", student="small-cnn-quarter", epochs=2, teacher_epochs=1,
    batch_size=32, lr=0.05, weight=1.0,
)  # fmt: skip
PAIRS = [("small-cnn", "small-cnn-quarter"), ("cnn", "small-cnn-quarter"), ("small-cnn-quarter", "cnn")]
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


def network(name="small-cnn-quarter", seed=0, shape=SHAPE):
    """A network whose batch norm has seen data, so that evaluation and training differ."""
    torch.manual_seed(seed)
    built = stages.build(name, 5, shape)
    built(2 * torch.randn(8, *shape) + 1)
    return built


def method(name, teacher="small-cnn-half", student="small-cnn-quarter"):
    return methods.make(name, stages.cut(network(student)), stages.cut(network(teacher, seed=1)), SHAPE)


def batch(count=12):
    return drawn(count, *SHAPE, seed=3), torch.arange(count) % 5
