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
    DRAWS,
    assert_same,
    batch_norm_net,
    batches,
    cells,
    dropout_net,
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


def trained(order, overlap, backend, network=batch_norm_net, steps=6, **options):
    """The optimizer after training, and how many graphs there were after each step."""
    torch._dynamo.reset()
    counters.clear()
    model, graphs = network(), []
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


@pytest.mark.parametrize("order", cells(ORDERS, "compiled before"))
def test_every_order_equals_serial_and_compiles_nothing_after_the_second_step(order):
    """A compiled graph is one for a number of threads: all of them in the first forward, half of them from then on."""
    expected, _ = trained(order, False, "aot_eager")
    found, graphs = trained(order, True, "aot_eager")
    assert_same(found, expected)
    assert graphs[0] > 0
    with intra_op_threads(4):
        _, graphs = trained(order, True, "aot_eager", steps=8)
    assert graphs[1:] == [graphs[1]] * 7
    assert graphs[1] <= 4


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_equals_serial():
    expected, _ = trained("compiled in place", False, "inductor")
    found, _ = trained("compiled in place", True, "inductor")
    assert_same(found, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_random_numbers_that_are_inductors_own_are_noticed():
    expected, _ = trained("compiled in place", False, "inductor", dropout_net)
    with pytest.warns(UserWarning, match=DRAWS):
        found, _ = trained("compiled in place", True, "inductor", dropout_net)
    assert_same(found, expected)


def test_a_compiled_companion_that_draws_nothing_runs_in_the_worker():
    places = Counter()

    def backend(graph, inputs):
        def run(*args):
            places[threading.current_thread().name] += 1
            return graph.forward(*args)

        return run

    class Network(nn.Module):  # torch 2.6 leaves a Sequential alone that is compiled in place
        def __init__(self):
            super().__init__()
            self.layers = batch_norm_net()

        def forward(self, x):
            return self.layers(x)

    trained("compiled in place", True, backend, Network, steps=4)
    assert places == {"MainThread": 5, "dcl_optim_0": 3}, "only the first forward of the companion is serial"
