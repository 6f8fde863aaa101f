"""Where the companion lives: on the model's device or its own, without being moved more often than the script asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, batches, mlp, sgd, train, wrap

META = torch.device("meta")


def small() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def devices(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("companion", [small, small()], ids=["callable", "module"])
def test_a_given_companion_is_put_on_the_models_device(companion: Any) -> None:
    optimizer = wrap(mlp().to(META), companion=companion, loss_scale=1.0)
    assert devices(optimizer.companion) == {META}


def test_a_given_companion_stays_where_companion_device_says() -> None:
    optimizer = wrap(mlp().to(META), companion=small(), companion_device="cpu")
    assert devices(optimizer.companion) == {torch.device("cpu")}


@pytest.fixture
def _parameters_keep_their_identity() -> Iterator[None]:
    """As they do on their way to a GPU, where their data alone is exchanged."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_parameters_keep_their_identity")
def test_a_given_companion_follows_the_model_and_keeps_its_dtype() -> None:
    model = mlp()
    optimizer = wrap(model, companion=small().float(), loss_scale=1.0)
    optimizer.forecaster._sync.follow()
    assert devices(optimizer.companion) == {torch.device("cpu")}
    model.to(META)
    optimizer.forecaster._sync.follow()
    assert devices(optimizer.companion) == {META}
    assert optimizer.companion.weight.dtype == torch.float32


@pytest.mark.parametrize("spread", ["model", "companion"])
def test_what_is_spread_over_devices_is_left_where_it_is(spread: str) -> None:
    model, companion = mlp(), mlp()
    (model if spread == "model" else companion)[2].to(META)
    optimizer = wrap(model.to(META) if spread == "companion" else model, companion=companion)
    before = [parameter.device for parameter in companion.parameters()]
    optimizer.forecaster._sync.follow()
    assert [parameter.device for parameter in optimizer.companion.parameters()] == before


def test_a_device_with_an_index_that_tensors_do_not_name_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = DCLOptimizer(sgd(model), model, companion_device="cpu:0")
    loads: list[Any] = []
    own = optimizer.companion_optimizer
    monkeypatch.setattr(own, "load_state_dict", lambda state, load=own.load_state_dict: (loads.append(1), load(state)))
    train(model, optimizer, batches(5))
    assert loads == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"companion_device='cuda' is no device here: "):
        wrap(mlp(), companion_device="cuda")


@pytest.mark.gpu
def test_a_given_companion_learns_on_the_models_gpu() -> None:
    model = mlp().cuda()
    loads: list[Any] = []
    optimizer = wrap(model, companion=small, companion_device="cuda")
    optimizer.companion_optimizer.register_load_state_dict_pre_hook(lambda *_: loads.append(1))
    train(model, optimizer, [(x.cuda(), y.cuda()) for x, y in batches(3)])
    assert loads == []
    assert optimizer.penalty > 0


@pytest.mark.usefixtures("_parameters_keep_their_identity")
def test_an_optimizer_over_a_given_companion_goes_with_it() -> None:
    companion = small()
    own = torch.optim.SGD(companion.parameters(), lr=0.1)
    wrap(mlp().to(META), companion=companion, companion_optimizer=own)
    assert {parameter.device for parameter in own.param_groups[0]["params"]} == {META}


MOVES = r"companion shares frozen parameters with the model.*other parameters"


@pytest.mark.parametrize(
    ("place", "message"),
    [({"companion_dtype": torch.float32}, MOVES), ({"companion_device": META}, "companion_device=.*holds no values")],
)
def test_frozen_parameters_that_a_given_companion_shares_are_not_moved(place: dict[str, Any], message: str) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    companion = nn.Sequential(model[0], nn.Tanh(), nn.Linear(12, CLASSES).double())
    with pytest.raises(ValueError, match=message):
        wrap(model, companion=companion, **place)
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("cpu", torch.float64)}
    wrap(model, companion=companion)
