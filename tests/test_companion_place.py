"""Where the companion lives: a copy where the model is, of its dtype, and a given companion where it was put."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import CLASSES, FEATURES, MODELS, assert_same, batches, mlp, sgd, train, wrap

CPU, META = torch.device("cpu"), torch.device("meta")


def small() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def devices(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


# ---- a copy follows the model ----------------------------------------------------------------------------------------


@pytest.fixture
def _parameters_keep_their_identity() -> Iterator[None]:
    """As they do on their way to a GPU, where their data alone is exchanged."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_parameters_keep_their_identity")
def test_a_copy_goes_with_the_model_and_its_optimizer_with_it() -> None:
    model = mlp()
    optimizer = wrap(model)
    assert devices(optimizer.companion) == {CPU}
    model.to(META)
    optimizer.forecaster._network.follower.follow()
    assert devices(optimizer.companion) == {META}
    assert {parameter.device for parameter in optimizer.companion_optimizer.param_groups[0]["params"]} == {META}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_takes_the_models_dtype(dtype: torch.dtype) -> None:
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, batches(2))
    model.to(dtype)
    model(torch.zeros(2, FEATURES, dtype=dtype))
    assert {parameter.dtype for parameter in optimizer.companion.parameters()} == {dtype}
    states = optimizer.companion_optimizer.state.values()
    assert {state["momentum_buffer"].dtype for state in states} == {dtype}


def test_the_state_is_not_loaded_anew_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = wrap(model)
    loads: list[Any] = []
    own = optimizer.companion_optimizer
    monkeypatch.setattr(own, "load_state_dict", lambda state, load=own.load_state_dict: (loads.append(1), load(state)))
    train(model, optimizer, batches(5))
    assert loads == []


# ---- a given companion stays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("companion", [small, small()], ids=["callable", "module"])
def test_a_given_companion_stays_where_it_is_and_keeps_its_dtype(companion: Any) -> None:
    model = mlp()
    optimizer = wrap(model, companion=companion, loss_scale=1.0)
    model.to(META).float()
    optimizer.forecaster._network.follower.follow()
    assert devices(optimizer.companion) == {CPU}
    assert optimizer.companion.weight.dtype == torch.float64


def test_frozen_parameters_that_a_given_companion_shares_stay() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    companion = nn.Sequential(model[0], nn.Tanh(), nn.Linear(12, CLASSES).double())
    optimizer = wrap(model, companion=companion)
    train(model, optimizer, batches(2))
    assert optimizer.companion[0] is model[0]


class Elsewhere(nn.Module):
    """A companion on another device or of another dtype, which moves its inputs itself."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x.to(next(self.network.parameters())))
        return logits


@pytest.mark.parametrize("name", ["mlp", "batch_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_given_companion_of_its_own_dtype_is_the_loop_written_by_hand(name: str, dtype: torch.dtype) -> None:
    model, hand = MODELS[name](), MODELS[name]()
    companion = copy.deepcopy(hand).to(dtype)
    optimizer = wrap(model, companion=Elsewhere(copy.deepcopy(companion)))
    base, chaser = sgd(hand), sgd(companion)
    train(model, optimizer, batches(20))
    for x, y in batches(20):
        z, c = hand(x), companion(x.to(dtype))
        base.zero_grad()
        (F.cross_entropy(z, y) + F.mse_loss(z, c.detach().double())).backward()
        base.step()
        chaser.zero_grad()
        wide = c.detach().float()
        target = torch.lerp(z.detach(), c.detach().double(), 0.6).float()
        c.backward((2 / c.numel() * (wide - target)).to(dtype))
        chaser.step()
    assert next(optimizer.companion.parameters()).dtype == dtype
    assert_same(model, hand, rtol=1e-3, atol=1e-4)
    ours, by_hand, start = (flat(module) for module in (optimizer.companion, companion, MODELS[name]()))
    assert (ours - by_hand).norm() < 0.1 * (by_hand - start).norm()


@pytest.mark.gpu
def test_a_given_companion_on_a_gpu_beside_a_model_on_the_cpu() -> None:
    model, hand = mlp(), mlp()
    optimizer = wrap(model, companion=Elsewhere(copy.deepcopy(model).cuda()))
    other = wrap(hand, companion=copy.deepcopy(hand))
    train(model, optimizer, batches(10))
    train(hand, other, batches(10))
    assert_same(model, hand, rtol=1e-9, atol=1e-12)
    assert_same(optimizer.companion.network.cpu(), other.companion, rtol=1e-9, atol=1e-12)
