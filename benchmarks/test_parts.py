"""pytest-benchmark's view of the wrapper's own parts: what is left of a step when the networks cost nothing."""

from __future__ import annotations

import math

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from benchmarks import growth, networks
from benchmarks.methods import METHODS, start
from benchmarks.script import sgd
from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.forward import Forward
from dcl_optim.loss.reader import Loss, LossReader
from dcl_optim.prototypes import Prototypes

BATCH = 128
ROUNDS = {"rounds": 20, "warmup_rounds": 2}


@pytest.mark.parametrize("classes", [10, 1_000, 10_000])
@pytest.mark.parametrize("part", ["penalty", "penalty and step"])
def test_prototypes(benchmark: BenchmarkFixture, part: str, classes: int) -> None:
    """What DCP adds to a step: the penalty and class sums at the backward, the prototypes' move at the step."""
    logits, labels = torch.randn(BATCH, classes), torch.randint(classes, (BATCH,))
    group = DataParallelGroup(nn.Identity(), process_group=None)
    prototypes = Prototypes(classes, ignore_index=-100, update="batch", like=logits, group=group)
    forward, loss = Forward(logits, step=3), Loss(1.0, labels, None, class_dim=1)
    distance = distances.resolve_distance("mse")

    def once() -> None:
        penalty = prototypes.penalty(forward, loss, distance)
        prototypes.observe(forward, loss, penalty, distance, 0.6)
        if part == "penalty":
            prototypes.forget()
        else:
            prototypes.step()

    benchmark.group = f"DCP: {part}"
    benchmark.pedantic(once, **ROUNDS)
    assert bool(prototypes.seen.any()) is (part != "penalty")


@pytest.mark.parametrize("classes", [10, 1_000, 100_000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reading_the_loss_scale(benchmark: BenchmarkFixture, smoothing: float, classes: int) -> None:
    """Reading what the loss was multiplied by off its gradient."""
    logits = torch.randn(BATCH, classes, requires_grad=True)
    loss = nn.functional.cross_entropy(logits, torch.randint(classes, (BATCH,)), label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(8.0 * loss, logits)
    benchmark.group = f"loss scale, label smoothing {smoothing}"
    reader, forward = LossReader(), Forward(logits, step=3)
    reader.read(forward, gradient, several=False)  # the form is chosen
    found = benchmark.pedantic(reader.read, (forward, gradient, False), **ROUNDS)
    assert math.isclose(found.scale, 8.0, rel_tol=1e-2)


@pytest.mark.parametrize("wrapper", ["none", "DCLOptimizer", "DCPOptimizer"])
def test_the_hooks_on_a_linear_layer(benchmark: BenchmarkFixture, wrapper: str) -> None:
    """A step with weight 0 of a network that costs nothing: what is left is the wrapper."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
    base = sgd(model.parameters())
    optimizer = {
        "none": lambda: base,
        "DCLOptimizer": lambda: DCLOptimizer(base, model, weight=0.0),
        "DCPOptimizer": lambda: DCPOptimizer(base, model, 3, weight=0.0),
    }[wrapper]()
    x, y = torch.randn(8, 4), torch.randint(3, (8,))

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    benchmark.group = "a step of nn.Linear(4, 3), weight 0"
    benchmark.pedantic(step, rounds=50, iterations=20, warmup_rounds=2)


@pytest.mark.parametrize("method", ["plain", "handwritten DCL", "DCLOptimizer", "DCPOptimizer"])
def test_many_small_layers(benchmark: BenchmarkFixture, method: str) -> None:
    """A step of 256 layers of 16 units: what the wrapper does for each module and each parameter."""
    training = start(METHODS[method], growth.SERIES["layers"].workload(256))
    assert len(list(training.model.parameters())) == 2 * 256
    assert isinstance(training.model, networks.Network)
    benchmark.group = "256 layers of 16 units, batch 8"
    benchmark.pedantic(training.step, rounds=20, warmup_rounds=2)
