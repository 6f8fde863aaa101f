"""The contract of a torch.optim citizen: groups, state, hooks, gradients."""

import copy
import functools

import pytest
import torch

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from tests.helpers import backward, huber, mlp, one, sgd, wrap


def test_is_an_optimizer_and_shares_the_bases_objects():
    model = mlp()
    base = sgd(model)
    optimizer = wrap(model, base)
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


def test_repr_shows_what_was_chosen_and_the_base():
    model = mlp()
    optimizer = wrap(model)
    assert repr(optimizer).startswith("DCLOptimizer(weight=1.0, alpha=0.99, distance=mse, model=Sequential)\nSGD (")
    kl = functools.partial(distances.kl, temperature=2.0)
    for arguments, chosen in (
        ({"distance": kl}, "distance=kl, "),
        ({"distance": huber}, "distance=huber, "),
    ):
        assert chosen in repr(DCPOptimizer(sgd(model), model, **arguments)).splitlines()[0]
    assert "weight=auto, alpha=0.97, distance=mse" in repr(DCPOptimizer(sgd(model), model))


@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
def test_parameters_in_place_of_an_optimizer_are_refused(kind):
    """With a model the error has the right call; without one Python names the arguments."""
    message = rf"got generator: .*{kind.__name__}\(torch.optim.SGD\(model.parameters\(\), lr=0.1\), model\)"
    with pytest.raises(TypeError, match=message):
        kind(mlp().parameters(), mlp())
    with pytest.raises(TypeError, match="'model'"):
        kind(mlp().parameters())
    with pytest.raises(TypeError, match="'lr'"):
        kind(mlp().parameters(), lr=0.1)


class HasMethods(torch.optim.SGD):
    mode = "train"

    def eval(self):
        self.mode = "eval"

    def train(self):
        self.mode = "train"

    def first_step(self):
        raise AssertionError

    update_hessian = first_step


def test_of_a_bases_own_methods_only_the_switch_of_modes_passes_through():
    model = mlp()
    optimizer = wrap(model, HasMethods(model.parameters(), lr=0.1))
    optimizer.eval()
    assert optimizer.base.mode == optimizer.companion_optimizer.mode == "eval"
    optimizer.train()
    assert optimizer.base.mode == optimizer.companion_optimizer.mode == "train"
    assert not hasattr(optimizer, "first_step")
    with pytest.raises(
        AttributeError, match=r"no attribute 'first_step'.*optimizer.step\(closure\) takes all"
    ) as caught:
        optimizer.first_step()
    assert "base" not in str(caught.value), "whose first_step would bypass the wrapper"
    with pytest.raises(AttributeError, match=r"no attribute 'update_hessian': its base has, optimizer.base.update_hes"):
        optimizer.update_hessian()
    assert not hasattr(wrap(mlp()), "train")
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        optimizer.nonsense()


def test_add_param_group_is_the_bases_own():
    class Tagged(torch.optim.SGD):
        def add_param_group(self, param_group):
            super().add_param_group({"tag": "set"} | param_group)

    model = mlp()
    optimizer = wrap(model, Tagged(model[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert [group["tag"] for group in optimizer.param_groups] == ["set", "set"]
