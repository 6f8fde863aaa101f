"""The contract of a torch.optim citizen: groups, state, hooks, gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import (
    assert_same,
    backward,
    batch_norm_net,
    batches,
    mlp,
    one,
    sgd,
    train,
    wrap,
)


def test_is_an_optimizer_and_shares_the_bases_objects():
    model = mlp()
    base = sgd(model)
    optimizer = DCLOptimizer(base, model, weight=1.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults is base.defaults
    optimizer.load_state_dict(optimizer.state_dict())  # torch rebinds the base's lists here
    assert optimizer.param_groups is base.param_groups
    optimizer.param_groups = list(base.param_groups)
    assert base.param_groups is optimizer.param_groups
    optimizer.state = copy.copy(base.state)
    assert base.state is optimizer.state
    optimizer.defaults = dict(base.defaults)
    assert base.defaults is optimizer.defaults


def test_step_and_state_hooks_fire_once_and_may_replace_the_state():
    model, calls = mlp(), []
    optimizer = wrap(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"note": "kept"})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    backward(model, *one())
    optimizer.step()
    state = optimizer.state_dict()
    assert state["note"] == "kept"
    optimizer.load_state_dict(state_dict=state)
    assert calls == ["pre", "post", "save", "loaded"]


def test_repr_shows_method_and_base():
    model = mlp()
    optimizer = wrap(model)
    shown = "DCLOptimizer(weight=1, alpha=0.6, distance=mse, loss_scale=auto, model=Sequential, companion={})\nSGD ("
    assert repr(optimizer).startswith(shown.format("not made yet"))
    train(model, optimizer, batches(1))
    size = sum(p.numel() for p in model.parameters())
    assert repr(optimizer).startswith(shown.format(f"{size:,} parameters"))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"loss_scale": 2.0}, "loss_scale=2.0"),
        ({"loss_scale": torch.amp.GradScaler("cpu")}, "loss_scale=GradScaler"),
        ({"distance": "kl"}, "distance=kl"),
        ({"distance": nn.L1Loss()}, "distance=L1Loss"),
        ({}, "num_classes=not known yet"),
        ({"num_classes": 3}, "num_classes=3"),
    ],
)
def test_repr_shows_what_was_chosen(arguments, shown):
    model = mlp()
    assert shown in repr(DCPOptimizer(sgd(model), model, **arguments)).splitlines()[0]


@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
@pytest.mark.parametrize("options", [{}, {"lr": 0.1}, {"model": nn.Linear(2, 2)}])
def test_parameters_in_place_of_an_optimizer_get_the_right_call(kind, options):
    message = rf"got generator: .*{kind.__name__}\(torch.optim.SGD\(model.parameters\(\), lr=0.1\), model\)"
    with pytest.raises(TypeError, match=message):
        kind(mlp().parameters(), **options)


def test_evaluating_gives_the_companion_in_eval_mode_and_leaves_it_as_it_was():
    model = batch_norm_net()
    model[1].eval()  # frozen statistics
    optimizer = DCLOptimizer(sgd(model), model)
    train(model, optimizer, batches(2))
    modes = [module.training for module in optimizer.companion.modules()]
    assert modes == [True, True, False, True, True]

    def look():
        with optimizer.evaluating() as companion:
            assert companion is optimizer.companion
            assert not any(module.training for module in companion.modules())
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert [module.training for module in optimizer.companion.modules()] == modes


def test_zero_grad_both_ways():
    model = mlp()
    optimizer = wrap(model)
    backward(model, *one())
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_several_groups_are_mirrored_by_name():
    model = mlp()
    groups = [{"params": [model[2].weight, model[2].bias], "lr": 0.5}, {"params": model[0].parameters(), "lr": 0.01}]
    optimizer = DCLOptimizer(torch.optim.SGD(groups, momentum=0.9), model, weight=1.0)
    mirrored = optimizer.companion_optimizer.param_groups
    assert [group["lr"] for group in mirrored] == [0.5, 0.01]
    assert {id(p) for p in mirrored[0]["params"]} == {id(p) for p in optimizer.companion[2].parameters()}
    assert {id(p) for p in mirrored[1]["params"]} == {id(p) for p in optimizer.companion[0].parameters()}
    optimizer.param_groups[1]["lr"] = 0.0
    before = copy.deepcopy(optimizer.companion)
    train(model, optimizer, batches(3))
    assert_same(optimizer.companion[0], before[0])
    assert not torch.equal(optimizer.companion[2].weight, before[2].weight)


def test_add_param_group_unfreezes_in_both():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    assert optimizer.companion[0].weight is model[0].weight
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.03})
    own = optimizer.companion[0].weight
    assert own is not model[0].weight
    assert torch.equal(own, model[0].weight)
    before = own.detach().clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(optimizer.companion[0].weight, before)
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == [0.1, 0.03]


class CountsInItsGroups(torch.optim.SGD):
    """Its own bookkeeping in the groups: a number, and a tensor that it counts up in place."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group |= {"count": 0, "total": torch.zeros(())}

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["total"].add_(1)
        return super().step(closure)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_what_an_optimizer_counts_in_its_groups_is_its_own_and_what_the_script_sets_is_shared(tensor_lr):
    model = mlp()
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = DCLOptimizer(CountsInItsGroups(model.parameters(), lr=lr), model, companion_lr_scale=0.5, weight=1.0)
    ours, theirs = optimizer.param_groups[0], optimizer.companion_optimizer.param_groups[0]
    for steps, batch in enumerate(batches(4), start=1):
        if steps == 3:
            if tensor_lr:
                ours["lr"].fill_(0.04)
            else:
                ours["lr"] = 0.04
            ours["momentum"] = 0.5
        train(model, optimizer, [batch])
        assert (ours["count"], theirs["count"], float(ours["total"]), float(theirs["total"])) == (steps,) * 4
        assert float(theirs["lr"]) == pytest.approx(0.02 if steps >= 3 else 0.05)
        assert theirs["momentum"] == (0.5 if steps >= 3 else 0.9)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(1))
    assert optimizer.companion_optimizer.param_groups[0]["count"] == optimizer.param_groups[0]["count"] == 5


def test_a_companion_that_steps_less_often_counts_its_own_steps():
    model = mlp()
    optimizer = DCLOptimizer(CountsInItsGroups(model.parameters()), model, companion_every=2)
    train(model, optimizer, batches(5))
    ours, theirs = optimizer.param_groups[0], optimizer.companion_optimizer.param_groups[0]
    assert (ours["count"], theirs["count"], float(ours["total"]), float(theirs["total"])) == (5, 2, 5.0, 2.0)


class HasMethods(torch.optim.SGD):
    mode = "train"

    def eval(self):
        self.mode = "eval"

    def train(self):
        self.mode = "train"

    def first_step(self):
        raise AssertionError


def test_of_a_bases_own_methods_only_the_switch_of_modes_passes_through():
    model = mlp()
    optimizer = DCLOptimizer(HasMethods(model.parameters(), lr=0.1), model, weight=1.0)
    optimizer.eval()
    assert optimizer.base.mode == optimizer.companion_optimizer.mode == "eval"
    optimizer.train()
    assert optimizer.base.mode == optimizer.companion_optimizer.mode == "train"
    assert not hasattr(optimizer, "first_step")
    with pytest.raises(AttributeError, match=r"no attribute 'first_step'; its base optimizer has: use \.base\.fir"):
        optimizer.first_step()
    assert not hasattr(wrap(mlp()), "train")
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        optimizer.nonsense()
