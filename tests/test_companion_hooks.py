"""The model's own hooks: none reports the companion's values to the script, those of the network itself are copied."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp, one, sgd, train, wrap

RECORDS: list[Tensor] = []
FEATURE = None


def wrap_and_hear(model: nn.Module, **options: Any) -> tuple[Any, str]:
    """Wrap a model; return what its one warning says of the hooks."""
    optimizer = wrap(model, **options)
    with pytest.warns(UserWarning, match=r"does not copy these hooks.*register it on optimizer\.companion") as caught:
        assert optimizer.companion is not None  # which makes the copy, as the first forward would
    assert len(caught) == 1
    return optimizer, str(caught[0].message)


# ---- hooks that reach the script's data -----------------------------------------------------------------------------


class Recorder:
    def __init__(self, store: list[Tensor]) -> None:
        self.store = store

    def see(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.store.append(output.detach())

    __call__ = see


def by_closure(store: list[Tensor]) -> Any:
    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        store.append(output.detach())

    return record


def by_default(store: list[Tensor]) -> Any:
    return lambda module, inputs, output, store=store: store.append(output.detach())


def by_keyword_default(store: list[Tensor]) -> Any:
    return lambda module, inputs, output, *, store=store: store.append(output.detach())


def by_method_in_closure(store: list[Tensor]) -> Any:
    keep = store.append
    return lambda module, inputs, output: keep(output.detach())


def by_partial(store: list[Tensor]) -> Any:
    return functools.partial(lambda keep, module, inputs, output: keep.append(output.detach()), store)


def by_bound_method(store: list[Tensor]) -> Any:
    return Recorder(store).see


def by_object(store: list[Tensor]) -> Any:
    return Recorder(store)


def record_globally(module: nn.Module, inputs: Any, output: Tensor) -> None:
    RECORDS.append(output.detach())


RECORDERS = {
    by_closure: "record",
    by_default: "<lambda>",
    by_keyword_default: "<lambda>",
    by_method_in_closure: "<lambda>",
    by_partial: "<lambda>",
    by_bound_method: "Recorder.see",
    by_object: "Recorder",
    lambda store: record_globally: "record_globally",
}


@pytest.mark.parametrize("recorder", RECORDERS, ids=lambda recorder: recorder.__name__)
def test_what_a_hook_records_is_the_models_and_the_hook_is_named(recorder: Any) -> None:
    RECORDS.clear()
    model, store = mlp(), []
    model[1].register_forward_hook(recorder(store))
    optimizer, message = wrap_and_hear(model)
    assert f"hooks of the model: '1' ({RECORDERS[recorder]});" in message
    assert not optimizer.companion[1]._forward_hooks
    train(model, optimizer, batches(3))
    seen = store or RECORDS
    assert len(seen) == 3
    assert_same(seen[0], torch.tanh(mlp()[0](one()[0])).detach())


def test_a_name_that_is_none_is_one_that_a_hook_may_set() -> None:
    """A loss on such a feature would otherwise be one on the companion's."""
    feature = None

    def set_global(module: nn.Module, inputs: Any, output: Tensor) -> None:
        global FEATURE
        FEATURE = output

    def set_nonlocal(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal feature
        feature = output

    model = mlp()
    model[1].register_forward_hook(set_global)
    model[1].register_forward_hook(set_nonlocal)
    optimizer, message = wrap_and_hear(model)
    assert "'1' (set_global), '1' (set_nonlocal)" in message
    for x, y in batches(2):
        expected = model[:2](x)
        train(model, optimizer, [(x, y)])
        assert_same(FEATURE, expected)
        assert_same(feature, expected)


def test_one_warning_names_all_hooks_that_are_not_copied_and_no_other() -> None:
    model = mlp()
    first = wrap(model)  # its hooks are on the model, and not on the copy
    model = copy.deepcopy(model)
    for module in (model, model[1]):
        module.register_full_backward_hook(Recorder([]).see)
        module.register_full_backward_pre_hook(by_closure([]))
        module.register_forward_pre_hook(by_closure([]))
    nn.utils.spectral_norm(model[2])
    optimizer, message = wrap_and_hear(model)
    for module, functions in (("the model", 1), ("'1'", 2)):  # the companion gets what the model's pre-hooks have made
        assert message.count(f" {module} (record)") == functions
        assert message.count(f" {module} (Recorder.see)") == 1
    assert "'2'" not in message
    for module in (optimizer.companion, optimizer.companion[1]):
        assert not any((module._backward_hooks, module._backward_pre_hooks, module._forward_pre_hooks))
    assert first.companion is not optimizer.companion


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_gradients_that_a_hook_records_are_the_models(kind: str) -> None:
    model, seen = mlp(), []
    getattr(model[1], kind)(lambda *gradients: seen.append(gradients[-1]))
    optimizer, _ = wrap_and_hear(model)
    train(model, optimizer, batches(3))
    assert len(seen) == 3


def test_a_network_that_is_no_copy_has_no_hooks_to_lose() -> None:
    model = mlp()
    model[1].register_forward_hook(by_closure([]))
    wrap(model, companion=mlp)
    DCPOptimizer(sgd(model), model, CLASSES)


def test_a_loss_on_a_recorded_feature_without_a_penalty_is_the_base_alone() -> None:
    def trained(wrapped: bool) -> nn.Module:
        model, store = mlp(), {}
        model[1].register_forward_hook(lambda module, inputs, output: store.__setitem__("feature", output))
        optimizer = wrap_and_hear(model, weight=0.0)[0] if wrapped else sgd(model)
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
        optimizer, called = wrap_and_hear(model)[0], model
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
        optimizer, _ = wrap_and_hear(called)
    numbers = []
    for x, y in batches(4):
        expected = torch.tanh(F.linear(x, model.net[0].weight, model.net[0].bias)).detach()
        train(called, optimizer, [(x, y)])
        assert_same(store["feature"], expected, rtol=1e-12, atol=1e-12)
        numbers.append(len(graphs))
    assert numbers == [2] * 4  # the model's and the companion's
    torch.compiler.reset()


def test_a_hook_that_changes_the_network_is_registered_on_the_companion_too() -> None:
    model, scale = mlp(), [3.0]

    def scaled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * scale[0]

    model[1].register_forward_hook(scaled)
    optimizer, _ = wrap_and_hear(model)
    optimizer.companion[1].register_forward_hook(scaled)
    train(model, optimizer, batches(1))
    assert optimizer.penalty == 0
    assert wrapped_without(model, scaled) > 0


def wrapped_without(model: nn.Module, hook: Any) -> float:
    optimizer, _ = wrap_and_hear(model)
    with pytest.warns(UserWarning, match="first forecast of dcl_optim's companion.*hooks of the model"):
        train(model, optimizer, batches(1))
    return optimizer.penalty


# ---- hooks of the network itself ------------------------------------------------------------------------------------


def assert_copied(model: nn.Module) -> Any:
    """The first forecast is the model's output, and what the model learns later is not the companion's at once."""
    optimizer = wrap(model)
    train(model, optimizer, batches(1))
    assert optimizer.penalty == 0
    train(model, optimizer, batches(2))
    assert optimizer.penalty > 0
    return optimizer


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_of_torch_are_copied(norm: Any) -> None:
    model = mlp()
    norm(model[0])
    assert_copied(model)


class Keeper:
    """Keeps what a layer gave, as timm's FeatureHooks does."""

    def __init__(self) -> None:
        self.kept = torch.zeros(())

    def keep(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept = output


class Gated(nn.Module):
    """Reads what a hook has kept of an inner layer: one of its methods, or of an object that it holds."""

    def __init__(self, keeper: Keeper | None = None) -> None:
        super().__init__()
        self.net, self.kept, self.keeper = mlp(), torch.zeros(()), keeper
        self.net[0].register_forward_hook(functools.partial(self.keep if keeper is None else keeper.keep, "hidden"))

    keep = Keeper.keep

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        return output + (self.kept if self.keeper is None else self.keeper.kept).mean()


def test_a_method_of_the_model_as_hook_is_the_copys_own() -> None:
    optimizer = assert_copied(model := Gated())
    assert optimizer.companion.kept is not model.kept


def test_a_method_of_what_the_model_holds_as_hook_is_the_copys_own() -> None:
    optimizer = assert_copied(model := Gated(Keeper()))
    assert optimizer.companion.keeper.kept is not model.keeper.kept


def test_a_companion_as_the_model_is_copied_without_a_warning() -> None:
    model = mlp()
    outer_pre(model)
    wrap(wrap(model).companion)


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


@pytest.mark.parametrize(
    ("change", "order"),
    [(outer_pre, "before"), (outer_pre, "after"), (outer_pre_with_data, "before"), (outer_output, "after")],
)
def test_the_first_penalty_is_zero(change: Any, order: str) -> None:
    """The companion gets the inputs that the model's pre-hooks have made, has none of them, and nothing is said."""
    model = mlp()
    if order == "before":
        change(model)
    optimizer = wrap(model)
    assert isinstance(optimizer.companion, nn.Module)  # it is made now, if not before
    assert not optimizer.companion._forward_pre_hooks
    if order == "after":  # a later hook's output comes after the penalty's place: both networks are held before it
        change(model)
    train(model, optimizer, batches(1))
    assert optimizer.penalty == 0


class Normalized(nn.Module):
    """Makes its weight in a pre-hook, which changes the inputs too."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.direction = mlp(), nn.Parameter(torch.ones(CLASSES).double())
        self.register_forward_pre_hook(self.make)

    def make(self, module: nn.Module, args: Any) -> Any:
        module.scale = module.direction / module.direction.norm()
        return twice_the_input(module, args)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def test_a_pre_hook_of_the_model_that_makes_a_weight_trains_the_companions() -> None:
    optimizer = assert_copied(Normalized())
    assert not torch.equal(optimizer.companion.direction, torch.ones(CLASSES))


def test_a_hook_of_a_library_stays_where_a_dropped_one_has_its_number() -> None:
    """As in a model that was saved whole: the numbers of hooks begin anew in each process."""
    model = mlp()
    nn.utils.spectral_norm(model[2])
    (key,) = model[2]._forward_pre_hooks
    model[0]._forward_hooks[key] = by_closure([])
    optimizer, message = wrap_and_hear(model)
    assert "'0' (record)" in message
    assert len(optimizer.companion[2]._forward_pre_hooks) == 1
    assert not optimizer.companion[0]._forward_hooks
