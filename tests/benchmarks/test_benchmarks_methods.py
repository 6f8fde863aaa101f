"""Each row of the benchmark is what its name says, and those that claim to train the same do."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector as flat

from benchmarks.methods import (
    ALPHA,
    METHODS,
    WEIGHT,
    PrototypesByHand,
    Script,
    companion_learning,
    companion_prototype,
    start,
)
from benchmarks.workloads import ON_CPU, WORKLOADS

PAPER = {"weight": WEIGHT, "alpha": ALPHA, "distance": "squared"}
PAPERS = {
    "DCP, line": partial(companion_prototype, **PAPER, update="batch"),
    "DCP, term": partial(companion_prototype, **PAPER, update="batch", term=True),
    "DCL, line": partial(companion_learning, **PAPER, companion_fraction=1),
    "DCL, term": partial(companion_learning, **PAPER, companion_fraction=1, term=True),
}


def trained(build, workload="mlp", rows=16):
    """A small script in float64 after five steps."""
    work = WORKLOADS[workload]
    batches = [(x[:rows].double(), y[:rows]) for x, y in work.batches()]
    training = build(Script(work.model().double(), batches, work))
    for _ in range(5):
        training.step()
    return training


def weights(training):
    return flat(training.model.parameters()).detach()


@pytest.mark.parametrize("workload", ["mlp", "cnn"])
@pytest.mark.parametrize("way", ["DCL, line", "DCL, term"])
def test_the_wrapper_trains_what_the_handwritten_loop_trains(workload, way):
    """Otherwise their times could not be compared."""
    builds = (PAPERS[way], METHODS["DCL, by hand"], METHODS["plain"])
    wrapped, written, plain = (trained(build, workload) for build in builds)
    for ours, theirs in ((wrapped.model, written.model), (wrapped.second, written.second)):
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(weights(wrapped), weights(plain))


@pytest.mark.parametrize("method", ["DCL", "DCP"])
def test_line_and_term_train_alike_and_the_defaults_are_other_settings(method):
    line, term = f"{method}, line", f"{method}, term"
    ends = [weights(trained(build)) for build in (METHODS[line], METHODS[term], PAPERS[line], PAPERS[term])]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ends[3], ends[2], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ends[0], ends[2])


def test_prototypes_by_hand_move_to_the_class_means():
    prototypes = PrototypesByHand(3, torch.device("cpu"))
    prototypes.rows[0] = torch.tensor([1.0, 0.0, 0.0])
    z, y = torch.tensor([[3.0, 0.0, 0.0], [5.0, 2.0, 0.0], [0.0, 8.0, 0.0]]), torch.tensor([0, 0, 1])
    prototypes.learn(z, y, alpha=0.75)
    torch.testing.assert_close(prototypes.rows, torch.tensor([[1.75, 0.25, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("method", "workload"), [*((method, "cnn") for method in METHODS), *(("DCL, line", name) for name in ON_CPU)]
)
def test_methods_and_networks_take_steps(method, workload):
    work = dataclasses.replace(WORKLOADS[workload], batch_size=2)
    training = start(METHODS[method], work, warm_up=1)
    assert not torch.equal(weights(training), flat(work.model().parameters()))
