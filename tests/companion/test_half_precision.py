"""A companion in half precision: it computes in it, and learns in weights of float32 that its own are rounded from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, sgd, through_a_file, train, two_processes, wrap
from tests.reference import train as train_by

HALF = torch.bfloat16


def half_batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    return list(batches(steps, seed=seed, dtype=HALF))


def narrow(**options: Any) -> DCLOptimizer:
    return wrap(mlp(dtype=HALF), **options)


def weights_of(optimizer: DCLOptimizer) -> list[Tensor]:
    """What the companion's optimizer steps."""
    return [parameter for group in optimizer.companion_optimizer.param_groups for parameter in group["params"]]


def assert_rounded(optimizer: DCLOptimizer) -> None:
    """The network has the rounding of weights in float32, which are not in half precision themselves."""
    for weight, half in zip(weights_of(optimizer), optimizer.companion.parameters(), strict=True):
        assert (weight.dtype, half.dtype) == (torch.float32, HALF)
        assert torch.equal(weight.to(HALF), half)
    assert any(not torch.equal(weight, weight.to(HALF).float()) for weight in weights_of(optimizer))


def assert_same_state(first: DCLOptimizer, second: DCLOptimizer) -> None:
    assert_same(first.model, second.model)
    assert_same(first.companion, second.companion)
    assert_same(first.state_dict(), second.state_dict())


# ---- it learns as in float32 -----------------------------------------------------------------------------------------


@cache
def companions_way(dtype: torch.dtype, lr: float) -> float:
    """How far the companion is from its start when the model has fitted 512 rows of ten classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(dtype)
    y = torch.arange(512) % 10
    x = (torch.randn(10, 32)[y] + 0.7 * torch.randn(512, 32)).to(dtype)
    optimizer = DCLOptimizer(sgd(model, lr=lr), model, companion_fraction=1)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().float()
    for _ in range(400):
        rows = torch.randint(512, (64,))
        train_by(optimizer, [(x[rows], y[rows])], loss=F.cross_entropy)
    assert (model(x).argmax(1) == y).all()
    end = nn.utils.parameters_to_vector(optimizer.companion.parameters()).detach().float()
    return float((end - start).norm())


@pytest.mark.parametrize(("dtype", "lr"), [(HALF, 0.1), (HALF, 0.01), (torch.float16, 0.01)])
def test_the_companion_moves_as_far_as_in_float32(dtype: torch.dtype, lr: float) -> None:
    """With weights in half precision alone it moves 0.77, 0.37 and 0.89 times as far."""
    assert companions_way(dtype, lr) / companions_way(torch.float32, lr) == pytest.approx(1.0, abs=0.05)


def test_parameters_in_float32_are_stepped_themselves_and_those_in_half_precision_by_others() -> None:
    class Mixed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](torch.tanh(self[0](x)).float())

    torch.manual_seed(0)
    model = Mixed(nn.Linear(FEATURES, 12, dtype=HALF), nn.Linear(12, CLASSES))
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.01}]
    optimizer = DCLOptimizer(torch.optim.SGD(groups, lr=0.1), model, weight=1.0, companion_fraction=1)
    body, head = optimizer.companion
    before = weights_of(optimizer)
    train(model, optimizer, half_batches(3))
    assert [id(weight) for weight in before] == [id(weight) for weight in weights_of(optimizer)]
    are_own = [weight is own for weight, own in zip(before, [*head.parameters(), *body.parameters()], strict=True)]
    assert are_own == [True, True, False, False]
    for weight, half in zip(before[2:], body.parameters(), strict=True):
        assert torch.equal(weight.to(HALF), half)


def test_rows_of_an_embedding_without_a_gradient_are_left() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, FEATURES, sparse=True), nn.Linear(FEATURES, CLASSES)).to(HALF)
    companion = copy.deepcopy(model)
    companion[0].weight.data += 1.0
    optimizer = wrap(model, companion=companion, alpha=0.0)
    before = copy.deepcopy(optimizer.companion[0].weight.detach())
    train(model, optimizer, [(torch.tensor([[1, 2], [1, 4]]), torch.tensor([0, 1]))])
    changed = (optimizer.companion[0].weight != before).any(1)
    assert changed.tolist() == [row in (1, 2, 4) for row in range(10)]


def test_weights_of_frozen_layers_stay_also_where_ranks_fill_gradients() -> None:
    """With the momentum of earlier steps."""
    with two_processes():
        optimizer = narrow(process_group=dist.group.WORLD)
        train(optimizer.model, optimizer, half_batches(4))
        optimizer.model[0].requires_grad_(False)
        before = copy.deepcopy(weights_of(optimizer))
        train(optimizer.model, optimizer, half_batches(4, seed=9))
        changed = [not torch.equal(weight, then) for weight, then in zip(weights_of(optimizer), before, strict=True)]
        assert changed == [False, False, True, True]


# ---- what else changes the weights -----------------------------------------------------------------------------------


def load(companion: nn.Module, source: nn.Module) -> None:
    companion.load_state_dict(source.state_dict())


def write_in_place(companion: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(companion.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


def assign(companion: nn.Module, source: nn.Module) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(source.parameters()), companion.parameters())


def step(optimizer: DCLOptimizer) -> DCLOptimizer:
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer.model, optimizer, half_batches(1))
    return optimizer


def resume(optimizer: DCLOptimizer) -> DCLOptimizer:
    again = narrow(companion=mlp(3, dtype=HALF))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    return again


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("after", [step, resume, copy.deepcopy])
@pytest.mark.parametrize("write", [load, write_in_place, assign])
def test_what_a_script_writes_into_the_network_stays(
    write: Callable[[nn.Module, nn.Module], None], after: Callable[[DCLOptimizer], DCLOptimizer], steps: int
) -> None:
    optimizer, other = narrow(companion=mlp(3, dtype=HALF)), mlp(7, dtype=HALF)
    train(optimizer.model, optimizer, half_batches(steps))
    write(optimizer.companion, other)
    found = after(optimizer)
    assert_same(list(found.companion.parameters()), list(other.parameters()))
    found.state_dict()  # as a step, it reads what the script has written
    for weight, half in zip(weights_of(found), other.parameters(), strict=True):
        assert torch.equal(weight, half.float())


# ---- copies and states -----------------------------------------------------------------------------------------------

BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), {}),
    "AdamW": (partial(torch.optim.AdamW, lr=0.01), {}),
    "given network and optimizer": (
        partial(torch.optim.SGD, lr=0.1),
        {"companion": lambda: mlp(3, dtype=HALF), "companion_optimizer": lambda: partial(torch.optim.Adam, lr=1e-4)},
    ),
}


def build(base: str) -> DCLOptimizer:
    make, options = BASES[base]
    model = mlp(dtype=HALF)
    return DCLOptimizer(
        make(model.parameters()),
        model,
        weight=1.0,
        **{name: give() for name, give in options.items()},
        companion_fraction=1,
    )


def resumed(optimizer: DCLOptimizer, base: str) -> DCLOptimizer:
    again = build(base)
    again.model.load_state_dict(through_a_file(optimizer.model.state_dict()))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    return again


def copied(optimizer: DCLOptimizer, base: str) -> DCLOptimizer:
    return copy.deepcopy(optimizer)


def pickled(optimizer: DCLOptimizer, base: str) -> DCLOptimizer:
    again: DCLOptimizer = pickle.loads(pickle.dumps(optimizer))
    return again


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("again", [resumed, copied, pickled])
def test_a_run_goes_on_bit_for_bit(again: Callable[[DCLOptimizer, str], DCLOptimizer], base: str) -> None:
    whole = build(base)
    train(whole.model, whole, half_batches(8))
    state = whole.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}
    moments = [tensor for one in state["optimizer"]["state"].values() for tensor in one.values()]
    assert {tensor.dtype for tensor in moments} == {torch.float32}
    other = again(whole, base)
    for each in (whole, other):
        train(each.model, each, half_batches(8, seed=5))
    assert_rounded(other)
    assert_same_state(whole, other)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_the_state_of_the_companions_optimizer_is_not_rounded_when_it_is_loaded(kind: Any) -> None:
    """Torch rounds that of the base, whose parameters are in half precision, to their dtype."""
    optimizers = []
    for seed in (0, 4):
        model = mlp(seed=seed, dtype=torch.bfloat16)
        optimizers.append(DCLOptimizer(kind(model.parameters(), lr=0.01), model, companion_fraction=1))
    first, second = optimizers
    train(first.model, first, batches(5, dtype=torch.bfloat16))
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(saved)
    assert_same(first.companion_optimizer.state_dict(), second.companion_optimizer.state_dict())
    assert_same(first.companion, second.companion)
