"""The companion's optimizer has a slot for each parameter of the base's, so unfreezing changes no checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import FEATURES, assert_same, batches, train, two_processes

BEFORE, AFTER = list(batches(4)), list(batches(3, seed=2))


def square(frozen: bool) -> nn.Sequential:
    """Layers of one shape: their states could be exchanged without complaint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)).double()
    model[0].requires_grad_(not frozen)
    return model


def wrap(model: nn.Module, groups: int, **options: Any) -> DCLOptimizer:
    layers = model.parameters() if groups == 1 else [{"params": layer.parameters()} for layer in model]
    return DCLOptimizer(torch.optim.SGD(layers, lr=0.1, momentum=0.9), model, **{"weight": 1.0} | options)


def unfrozen_midway(groups: int, steps_after: int = 2) -> tuple[nn.Module, DCLOptimizer]:
    model = square(frozen=True)
    optimizer = wrap(model, groups)
    train(model, optimizer, BEFORE[:2])
    model[0].requires_grad_(True)
    train(model, optimizer, BEFORE[2 : 2 + steps_after])
    return model, optimizer


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("steps_after", [0, 2])
@pytest.mark.parametrize("order", ["wrapped unfrozen", "unfrozen after wrapping", "unfrozen after a step"])
def test_a_resumed_run_equals_the_uninterrupted_one(order: str, groups: int, steps_after: int) -> None:
    model, optimizer = unfrozen_midway(groups, steps_after)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    again = square(frozen=order != "wrapped unfrozen")
    other = wrap(again, groups)
    if order == "unfrozen after a step":
        train(again, other, AFTER[:1])
    again[0].requires_grad_(True)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])

    train(model, optimizer, AFTER)
    train(again, other, AFTER)
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)


def companions_state(optimizer: DCLOptimizer) -> dict[str, Any]:
    return optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]


@pytest.mark.parametrize("groups", [1, 2])
def test_each_group_has_a_slot_for_each_of_the_bases_parameters(groups: int) -> None:
    model = square(frozen=True)
    optimizer = wrap(model, groups)
    train(model, optimizer, BEFORE[:2])
    theirs, ours = ([group["params"] for group in o.param_groups] for o in (optimizer, optimizer.companion_optimizer))
    assert [len(held) for held in ours] == [len(held) for held in theirs]
    slots = [slot for held in ours for slot in held]
    assert slots[2] is optimizer.companion[1].weight
    assert slots[3] is optimizer.companion[1].bias
    for empty, frozen in zip(slots[:2], model[0].parameters(), strict=True):
        assert (empty.numel(), empty.ndim, empty.dtype) == (0, frozen.ndim, frozen.dtype)
        assert not empty.requires_grad
        assert empty.grad is None
    assert companions_state(optimizer)["state"].keys() == {"2", "3"}

    model[0].requires_grad_(True)
    train(model, optimizer, BEFORE[2:])
    slots = [slot for group in optimizer.companion_optimizer.param_groups for slot in group["params"]]
    assert all(slot is own for slot, own in zip(slots, optimizer.companion.parameters(), strict=True))
    assert companions_state(optimizer)["state"].keys() == {"0", "1", "2", "3"}


def test_a_group_that_is_frozen_follows_the_schedule_all_the_same() -> None:
    model = square(frozen=True)
    optimizer = wrap(model, 2, companion_lr_scale=2.0)
    optimizer.param_groups[0]["lr"] = 0.25
    train(model, optimizer, BEFORE[:1])
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == [0.5, 0.2]
    model[0].requires_grad_(True)
    train(model, optimizer, BEFORE[1:2])
    before = optimizer.companion[0].weight.clone()
    train(model, optimizer, BEFORE[2:3])
    assert not torch.equal(optimizer.companion[0].weight, before)
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == [0.5, 0.2]


@pytest.mark.parametrize("frozen", [True, False])
def test_layers_that_are_added_to_the_base_have_a_group_and_slots_too(frozen: bool) -> None:
    model = square(frozen=True)
    optimizer = DCLOptimizer(torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9), model, weight=1.0)
    train(model, optimizer, BEFORE[:2])
    model[0].requires_grad_(not frozen)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.3})
    ours = optimizer.companion_optimizer.param_groups
    assert [(len(group["params"]), group["lr"]) for group in ours] == [(2, 0.1), (2, 0.3)]
    assert (ours[1]["params"][0].numel() == 0) == frozen
    model[0].requires_grad_(True)
    train(model, optimizer, BEFORE[2:])
    assert ours[1]["params"][0] is optimizer.companion[0].weight
    assert not torch.equal(optimizer.companion[0].weight, square(True)[0].weight)


def three(trained: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3))).double()
    for index, layer in enumerate(model):
        layer.requires_grad_(index in trained)
    return model


@pytest.mark.parametrize("other_order", [[2], [0, 2], [0, 1, 2]])
def test_a_network_that_is_unfrozen_from_the_top_is_resumed_in_a_script_that_has_another_order(
    other_order: list[int],
) -> None:
    model = three([2])
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, weight=1.0)
    for layer in (2, 1, 0):
        model[layer].requires_grad_(True)
        train(model, optimizer, BEFORE[:2])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = three(other_order)
    other = DCLOptimizer(torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9), again, weight=1.0)
    again.requires_grad_(True)
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    train(model, optimizer, AFTER)
    train(again, other, AFTER)
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)


def test_an_optimizer_that_a_callable_builds_gains_a_group_and_resumes_where_the_same_was_unfrozen() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        assert all(parameter.numel() for parameter in parameters)  # it gets no empty slot
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)

    runs = []
    for _ in range(2):
        model = square(frozen=True)
        optimizer = wrap(model, 1, companion_optimizer=make)
        train(model, optimizer, BEFORE[: 2 * (1 - len(runs))])
        assert optimizer.companion is not None  # before the layer is unfrozen, also in the run that resumes
        model[0].requires_grad_(True)
        runs.append((model, optimizer))
    (model, optimizer), (again, other) = runs
    train(model, optimizer, BEFORE[2:])
    assert [len(group["params"]) for group in optimizer.companion_optimizer.param_groups] == [2, 2]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, AFTER)
    train(again, other, AFTER)
    assert_same(other.companion, optimizer.companion)
    whole = wrap(square(frozen=False), 1, companion_optimizer=make)
    with pytest.raises(ValueError, match=r"groups of \[2, 2\] parameters, not \[4\]"):
        whole.load_state_dict(optimizer.state_dict())


def test_on_several_processes_the_empty_slots_take_no_part() -> None:
    """Every rank fills missing gradients with zeros, which an empty slot must not get."""
    model = square(frozen=True)
    optimizer = wrap(model, 1)
    seen = []
    optimizer.companion_optimizer.register_step_pre_hook(
        lambda own, *_: seen.append([slot.grad is None for slot in own.param_groups[0]["params"]])
    )
    with two_processes():
        train(model, optimizer, BEFORE[:1])
    assert seen == [[True, True, False, False]]


class Eager(torch.optim.SGD):
    """Makes its state in the constructor for all parameters, and needs it, as SaRA does and older torch's Adagrad."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr, momentum)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> Any:
        assert all(parameter in self.state for group in self.param_groups for parameter in group["params"])
        return super().step(closure)


def test_an_empty_slots_state_goes_with_it_and_what_takes_the_slot_gets_its_own() -> None:
    model = square(frozen=True)
    optimizer = DCLOptimizer(Eager(model.parameters()), model, weight=1.0)
    train(model, optimizer, BEFORE[:2])
    model[0].requires_grad_(True)
    train(model, optimizer, BEFORE[2:])
    ours, own = optimizer.companion_optimizer, list(optimizer.companion.parameters())
    assert {id(parameter) for parameter in ours.state} == {id(parameter) for parameter in own}
    assert all(ours.state[parameter]["momentum_buffer"].shape == parameter.shape for parameter in own)


class Wider(nn.Sequential):
    """Shares the model's names and has layers of its own before and behind."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "0", "1", "last"):
            self.add_module(name, nn.Linear(FEATURES, FEATURES))


def test_a_companions_parameters_with_names_of_their_own_end_the_first_group() -> None:
    model = square(frozen=False)
    companion = Wider().double()
    optimizer = wrap(model, 2, companion=companion)
    named = {id(parameter): name for name, parameter in companion.named_parameters()}
    groups = [[named[id(p)] for p in group["params"]] for group in optimizer.companion_optimizer.param_groups]
    strangers = ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert groups == [["0.weight", "0.bias", *strangers], ["1.weight", "1.bias"]]
    train(model, optimizer, BEFORE)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


# ---- states in other forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["numbers", "text"])
def test_states_in_other_forms_are_loaded(form: str) -> None:
    model = square(frozen=False)
    optimizer = wrap(model, 2)
    train(model, optimizer, BEFORE)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    own = saved[1]["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]
    assert own["state"].keys() == {"0", "1", "2", "3"}
    if form == "numbers":
        own["state"] = {int(key): value for key, value in own["state"].items()}
    again = square(frozen=False)
    other = wrap(again, 2)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(model, optimizer, AFTER)
    train(again, other, AFTER)
    assert_same(other.companion, optimizer.companion)


def test_an_optimizer_with_parameters_that_the_companion_does_not_know_goes_by_order() -> None:
    def started() -> tuple[nn.Module, DCLOptimizer]:
        model, companion, other = square(frozen=False), square(frozen=False), nn.Linear(2, 2).double()
        own = torch.optim.SGD([*companion.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
        return model, wrap(model, 1, companion=companion, companion_optimizer=own)

    model, optimizer = started()
    train(model, optimizer, BEFORE)
    again, resumed = started()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, AFTER)
    train(again, resumed, AFTER)
    assert_same(resumed.companion, optimizer.companion)
