"""pytest-benchmark's view of the wrapper's own parts: what is left of a step when the networks cost nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from benchmarks import growth, networks
from benchmarks.methods import METHODS, start
from benchmarks.script import sgd
from benchmarks.workloads import Workload
from dcl_optim import DCLOptimizer, DCPOptimizer

BATCH = 128


@pytest.mark.parametrize("classes", [10, 1_000])
@pytest.mark.parametrize("method", [name for name in METHODS if name == "plain" or "DCL" in name or "DCP" in name])
def test_the_logits_alone(benchmark: BenchmarkFixture, method: str, classes: int) -> None:
    """A linear layer of one input: reading the loss or the term, the penalty, and the prototypes' move at the step."""
    work = Workload(
        f"linear layer, {classes} classes", partial(networks.perceptron, (1, classes)), (1,), BATCH, classes
    )
    training = start(METHODS[method], work)
    benchmark.group = work.title
    benchmark.pedantic(training.step, rounds=20, warmup_rounds=2)


@pytest.mark.parametrize("wrapper", ["none", "DCLOptimizer", "DCPOptimizer"])
def test_the_hooks_on_a_linear_layer(benchmark: BenchmarkFixture, wrapper: str) -> None:
    """A step with weight 0 of a network that costs nothing: what is left is the wrapper."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
    base = sgd(model.parameters())
    optimizer = {
        "none": lambda: base,
        "DCLOptimizer": lambda: DCLOptimizer(base, model, weight=0.0),
        "DCPOptimizer": lambda: DCPOptimizer(base, model, weight=0.0),
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
