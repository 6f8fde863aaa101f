"""overlap=True with torch.compile: in every order the serial numbers, and nothing is compiled again and again."""

from __future__ import annotations

import shutil
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dcl_optim import DCLOptimizer
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    batches,
    intra_op_threads,
    snapshot,
    train,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Skipping serialization:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
ORDERS = ["compiled before", "compiled after", "compiled in place"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES))
        self.body, self.drop = nn.Sequential(*layers).double(), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(self.body(x))


def trained(order, overlap, backend, dropout=0.0, steps=6, **options):
    """The optimizer after training, and how many graphs there were after each step."""
    torch._dynamo.reset()
    counters.clear()
    model, graphs = Network(dropout), []
    call = torch.compile(model, backend=backend) if order == "compiled before" else model
    optimizer = DCLOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), call, overlap=overlap, **{"weight": 1.0} | options
    )
    if order == "compiled after":
        call = torch.compile(model, backend=backend)
    elif order == "compiled in place":
        model.compile(backend=backend)
    torch.manual_seed(7)
    for batch in batches(steps):
        train(call, optimizer, [batch])
        graphs.append(counters["stats"]["unique_graphs"])
    return snapshot(optimizer), graphs


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_equals_serial(order, dropout):
    expected, _ = trained(order, False, "aot_eager", dropout)
    found, graphs = trained(order, True, "aot_eager", dropout)
    assert_same(found, expected)
    assert graphs[0] > 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("dropout", "every"), [(0.0, 1), (0.3, 1), (0.3, 3)])
def test_inductor_whose_random_numbers_are_its_own_equals_serial(dropout, every):
    expected, _ = trained("compiled in place", False, "inductor", dropout, companion_every=every)
    found, _ = trained("compiled in place", True, "inductor", dropout, companion_every=every)
    assert_same(found, expected)


def test_a_compiled_companion_that_draws_nothing_runs_beside_the_model():
    places = Counter()

    def backend(graph, inputs):
        def run(*args):
            places[threading.current_thread().name] += 1
            return graph.forward(*args)

        return run

    trained("compiled in place", True, backend, steps=4)
    assert places == {"MainThread": 5, "dcl_optim_0": 3}, "only the first forward of the companion in its turn"


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_compiled_again_after_the_second_step(order):
    """A compiled graph is one for a number of threads: all of them in the first forward, half of them from then on."""
    with intra_op_threads(4):
        _, graphs = trained(order, True, "aot_eager", steps=8)
    assert graphs[1:] == [graphs[1]] * 7
    assert graphs[1] <= 4
