"""Each row of the benchmark is what its name says, and those that claim to train the same do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.utils import parameters_to_vector as flat

from benchmarks.methods import METHODS, PrototypesByHand, Script, Training, start
from benchmarks.workloads import ON_CPU, WORKLOADS, Setting

DOUBLE = torch.float64
MLP_PARAMETERS = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10


def trained(name: str, steps: int, workload: str = "mlp", rows: int = 16) -> Training:
    """A small script in float64 after some steps."""
    work = WORKLOADS[workload]
    batches = [(x[:rows], y[:rows]) for x, y in work.batches(dtype=DOUBLE)]
    training = METHODS[name].build(Script(work.model(dtype=DOUBLE), batches, work, Setting()))
    for _ in range(steps):
        training.step()
    return training


def weights(training: Training) -> torch.Tensor:
    return flat(training.model.parameters()).detach()


@pytest.mark.parametrize("workload", ["mlp", "cnn"])
@pytest.mark.parametrize("way", ["line", "term"])
def test_the_wrapper_trains_what_the_handwritten_loop_trains(workload: str, way: str) -> None:
    """Otherwise their times could not be compared."""
    names = (f"DCL, {way}, paper", "DCL, by hand", "plain")
    wrapped, written, plain = (trained(name, 5, workload) for name in names)
    for ours, theirs in ((wrapped.model, written.model), (wrapped.second, written.second)):
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(weights(wrapped), weights(plain))


@pytest.mark.parametrize("method", ["DCL", "DCP"])
def test_line_and_term_train_alike_and_the_defaults_are_other_settings(method: str) -> None:
    ends = {name: weights(trained(f"{method}, {name}", 5)) for name in ("line", "term", "line, paper", "term, paper")}
    torch.testing.assert_close(ends["term"], ends["line"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ends["term, paper"], ends["line, paper"], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ends["line"], ends["line, paper"])


@pytest.mark.parametrize("soft", [False, True])
def test_prototypes_by_hand_move_to_the_class_means(soft: bool) -> None:
    prototypes = PrototypesByHand(3, torch.device("cpu"))
    prototypes.rows[0] = torch.tensor([1.0, 0.0, 0.0])
    z, y = torch.tensor([[3.0, 0.0, 0.0], [5.0, 2.0, 0.0], [0.0, 8.0, 0.0]]), torch.tensor([0, 0, 1])
    prototypes.learn(z, torch.nn.functional.one_hot(y, 3).float() if soft else y, alpha=0.75)
    torch.testing.assert_close(prototypes.rows, torch.tensor([[1.75, 0.25, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(prototypes.of(y), prototypes.rows[[0, 0, 1]])


@pytest.mark.parametrize(
    ("method", "workload"), [*((method, "cnn") for method in METHODS), *(("DCL, line", name) for name in ON_CPU)]
)
def test_methods_and_networks_take_steps(method: str, workload: str) -> None:
    work = dataclasses.replace(WORKLOADS[workload], batch_size=2)
    training = start(METHODS[method], work, warm_up=1)
    assert not torch.equal(weights(training), flat(work.model().parameters()))


def test_state_is_counted_exactly() -> None:
    prototypes = 4 * 10 * 10
    companion = 2 * 4 * MLP_PARAMETERS  # with momentum
    random_state = torch.get_rng_state().nbytes  # from which the companion repeats the model's draws
    expected = {name: companion + random_state for name in METHODS if name.startswith("DCL")}
    # The numbers of rows, and the running accuracy.
    expected |= {name: prototypes + 4 * 10 + 8 for name in METHODS if name.startswith("DCP")}
    expected |= {"plain": 0, "DCP, by hand": prototypes, "DCL, by hand": companion}
    small = dataclasses.replace(WORKLOADS["mlp"], batch_size=4)
    assert {name: start(row, small).bytes_added() for name, row in METHODS.items()} == expected
