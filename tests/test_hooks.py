"""The model's own hooks: none reports the companion's values to the script, those of the network itself go along."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import hooks
from tests.helpers import assert_same, batches, mlp, one, sgd, train, wrap

FEATURES: list[Tensor] = []
FEATURE = None


def set_global(module: nn.Module, inputs: Any, output: Tensor) -> None:
    global FEATURE
    FEATURE = output.detach()


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def see(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen.append(output)


def by_closure(store: list[Tensor]) -> Any:
    return lambda module, inputs, output: store.append(output.detach())


def by_default(store: list[Tensor]) -> Any:
    return lambda module, inputs, output, store=store: store.append(output.detach())


def by_method_in_closure(store: list[Tensor]) -> Any:
    keep = store.append
    return lambda module, inputs, output: keep(output)


def by_helper(store: list[Tensor]) -> Any:
    def keep(output: Tensor) -> None:
        store.append(output)

    return lambda module, inputs, output: keep(output)


def by_partial(store: list[Tensor]) -> Any:
    return functools.partial(lambda keep, module, inputs, output: keep.append(output), store)


def by_bound_method(store: list[Tensor]) -> Any:
    recorder = Recorder()
    recorder.seen = store
    return recorder.see


RECORDERS = [by_closure, by_default, by_method_in_closure, by_helper, by_partial, by_bound_method]


@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_a_hook_records_is_the_models(recorder: Any) -> None:
    model, seen = mlp(), []
    model[1].register_forward_hook(recorder(seen))
    optimizer = wrap(model)
    train(model, optimizer, batches(3))
    assert len(seen) == 3
    assert_same(seen[0].detach(), torch.tanh(mlp()[0](one()[0])).detach())
    assert not optimizer.companion[1]._forward_hooks


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_gradients_that_a_hook_records_are_the_models(kind: str) -> None:
    model, seen = mlp(), []
    getattr(model[1], kind)(lambda *gradients: seen.append(gradients[-1]))
    optimizer = wrap(model)
    train(model, optimizer, batches(3))
    assert len(seen) == 3


def test_a_hook_that_sets_a_global_name_is_the_models() -> None:
    model = mlp()
    model[1].register_forward_hook(set_global)
    train(model, wrap(model), batches(2))
    model[0].register_forward_pre_hook(lambda module, inputs: FEATURES.append(inputs[0]))
    FEATURES.clear()
    train(model, wrap(model), batches(2))
    assert len(FEATURES) == 2


def test_a_loss_on_a_recorded_feature_without_a_penalty_is_the_base_alone() -> None:
    def trained(wrapped: bool) -> nn.Module:
        model, store = mlp(), {}
        model[1].register_forward_hook(lambda module, inputs, output: store.__setitem__("feature", output))
        optimizer = wrap(model, weight=0.0) if wrapped else sgd(model)
        train(model, optimizer, batches(3), lambda z, y: F.cross_entropy(z, y) + store["feature"].square().mean())
        return model

    assert_same(trained(True), trained(False))


@pytest.mark.parametrize("order", ["compiled in place", "compiled outside"])
def test_a_compiled_model_keeps_its_recorder_to_itself(order: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model, store = Network(), {"feature": torch.zeros(())}
    model.net[1].register_forward_hook(lambda module, inputs, output: store.update(feature=output.detach()))
    if order == "compiled in place":
        optimizer, called = wrap(model), model
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
        optimizer = wrap(called)
    numbers = []
    for x, y in batches(4):
        expected = torch.tanh(F.linear(x, model.net[0].weight, model.net[0].bias)).detach()
        train(called, optimizer, [(x, y)])
        assert_same(store["feature"], expected, rtol=1e-12, atol=1e-12)
        numbers.append(len(graphs))
    assert numbers == [2] * 4  # the model's and the companion's
    torch.compiler.reset()


# ---- hooks of the network itself ------------------------------------------------------------------------------------


def double(model: nn.Module) -> None:
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)


def normalise(model: nn.Module) -> None:
    model[1].register_forward_pre_hook(lambda module, inputs: (F.normalize(inputs[0]),))


def with_kwargs(model: nn.Module) -> None:
    def halve(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] / 2,), kwargs

    model[1].register_forward_pre_hook(halve, with_kwargs=True)


def steer(model: nn.Module) -> None:
    direction = torch.linspace(-1, 1, 12, dtype=torch.float64)
    model[1].register_forward_hook(lambda module, inputs, output: output + direction)


def spectral_norm(model: nn.Module) -> None:
    nn.utils.spectral_norm(model[0])


CHANGES = [double, normalise, with_kwargs, steer, spectral_norm]


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_are_part_of_the_network_go_along(change: Any) -> None:
    model = mlp()
    change(model)
    bare = copy.deepcopy(model)
    optimizer = wrap(model)
    x, y = one()
    optimizer.zero_grad()
    z = model(x)
    F.cross_entropy(z, y).backward()
    assert optimizer.penalty == 0
    assert_same(z.detach(), bare(x).detach())
    optimizer.step()
    train(model, optimizer, batches(2))
    assert optimizer.penalty > 0


class Gated(nn.Module):
    """Reads what a hook, one of its methods, has kept of an inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.kept = mlp(), torch.zeros(())
        self.net[0].register_forward_hook(functools.partial(self.keep, "hidden"))

    def keep(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.kept.mean()


def test_a_method_of_the_model_as_hook_is_the_copys_own() -> None:
    model = Gated()
    optimizer = wrap(model)
    train(model, optimizer, batches(1))
    assert optimizer.penalty == 0
    train(model, optimizer, batches(3))
    assert optimizer.companion.kept is not model.kept


# ---- hooks on the outermost module ----------------------------------------------------------------------------------


def twice_the_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def outer_pre(model: nn.Module) -> None:
    model.register_forward_pre_hook(twice_the_input)


def outer_pre_with_data(model: nn.Module) -> None:
    scale = [2.0]
    model.register_forward_pre_hook(lambda module, args: (args[0] * scale[0],))


def outer_output(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("change", [outer_pre, outer_pre_with_data, outer_output])
def test_the_first_penalty_is_zero(change: Any, order: str) -> None:
    model = mlp()
    if order == "before":
        change(model)
    optimizer = wrap(model)
    if order == "after":  # a later hook's output comes after the penalty's place: both networks are held before it
        change(model)
    train(model, optimizer, batches(1))
    assert optimizer.penalty == 0


def test_the_companion_is_evaluated_with_the_models_own_pre_hook() -> None:
    model = mlp()
    outer_pre(model)
    optimizer = wrap(model)
    x, _ = one()
    model.eval()
    assert_same(optimizer.companion.eval()(x), model(x))


# ---- the warning ----------------------------------------------------------------------------------------------------


def noisy_by_list(model: nn.Module) -> None:
    scale = [3.0]
    model[1].register_forward_hook(lambda module, inputs, output: output * scale[0])


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_hook_that_is_left_out_and_makes_a_difference_is_named(order: str) -> None:
    model = mlp()
    if order == "before":
        noisy_by_list(model)
    optimizer = wrap(model)
    if order == "after":
        noisy_by_list(model)
    with pytest.warns(
        UserWarning, match=r"lacks forward hooks of the model's modules \['1'\].*optimizer.companion too"
    ):
        train(model, optimizer, batches(1))
    train(model, optimizer, batches(1))

    saved = copy.deepcopy(optimizer.state_dict())
    again = mlp()
    noisy_by_list(again)
    other = wrap(again)
    other.load_state_dict(saved)
    train(again, other, batches(1))


def test_left_out_hooks_are_found_by_module() -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    assert hooks.left_out(model, twin) == []
    model[2].register_forward_hook(by_closure([]))
    assert hooks.left_out(model, twin) == ["2"]
