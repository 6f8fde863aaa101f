"""The model's hooks: those of libraries are the copy's too, none of the script's sees the companion's values."""

import functools
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import CLASSES, assert_same, batches, fit, mlp, sgd, train, wrap


class Recorder:
    """Keeps in a list of the script what a layer gets or gives, as feature extractors do."""

    def __init__(self, store):
        self.store = store

    def see(self, module, *values):
        last = values[-1]
        self.store.append(last if isinstance(last, Tensor) else last[0])


def by_method(store):
    return Recorder(store).see


def by_function(store):
    return lambda module, *values: Recorder(store).see(module, *values)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("forward_hook", by_function),
        ("forward_pre_hook", by_method),
        ("full_backward_hook", by_method),
        ("full_backward_pre_hook", by_function),
    ],
)
def test_what_a_hook_records_is_the_models(kind, record):
    """A loss on it is the script's: with weight 0 the run is that of the base alone."""

    def trained(wrapped):
        model, store = mlp(), []
        getattr(model[1], f"register_{kind}")(record(store))
        optimizer = wrap(model, weight=0.0) if wrapped else sgd(model)

        def loss(z, y):
            feature = store[-1] if "forward" in kind else z.new_zeros(())
            return F.cross_entropy(z, y) + feature.square().mean()

        train(model, optimizer, batches(3), loss)
        return model, store

    (model, store), (alone, expected) = trained(True), trained(False)
    assert len(expected) == 3
    assert_same(store, expected)
    assert_same(model, alone)


class Scaled(nn.Linear):
    """Computes a weight that its forward pass uses in a hook of its own, as parametrizations by hand do."""

    def __init__(self):
        super().__init__(12, CLASSES)
        self.factor = nn.Parameter(torch.ones(()))
        self.register_forward_pre_hook(self.scale)
        self.register_forward_hook(self.halve)

    def scale(self, module, inputs):
        self.scaled = self.factor * self.weight

    def halve(self, module, inputs, output):
        return output / 2

    def forward(self, x):
        return F.linear(x, self.scaled, self.bias)


def test_hooks_of_the_models_own_classes_are_the_copys_over_its_own():
    model = mlp()
    model[2] = Scaled().double()
    optimizer = wrap(model)
    fit(optimizer, batches(1))
    assert optimizer.logs()["penalty"] == 0
    fit(optimizer, batches(3))
    assert optimizer.logs()["penalty"] > 0
    assert optimizer.companion[2].factor != 1


def test_a_hook_that_changes_the_network_is_registered_on_the_companion_too():
    def scaled(module, inputs, output):
        return 3.0 * output

    for registers in (True, False):
        model = mlp()
        model[1].register_forward_hook(scaled)
        optimizer = wrap(model)
        if registers:
            optimizer.companion[1].register_forward_hook(scaled)
            fit(optimizer, batches(1))
        else:
            with pytest.warns(UserWarning, match=r"hooks of the model that are not copied.*optimizer\.companion too"):
                fit(optimizer, batches(1))
        assert (optimizer.logs()["penalty"] == 0) == registers


# ---- hooks of libraries ----------------------------------------------------------------------------------------------


def spectral_norm(model):
    """Beside a hook of the script with its number: in a model that was saved whole, numbers have begun anew."""
    nn.utils.spectral_norm(model[2])
    (key,) = model[2]._forward_pre_hooks
    model[0]._forward_hooks[key] = by_function([])


def hook_of_transformers(model):
    def halve(factor, module, inputs, output):
        return factor * output

    halve.__module__ = "transformers.modeling_utils"
    model[1].register_forward_hook(functools.partial(halve, 0.5))


@pytest.mark.parametrize("register", [spectral_norm, hook_of_transformers])
def test_hooks_of_libraries_are_copied(register):
    """The first prediction is the model's output, and what the model learns later is not the companion's at once."""
    model = mlp()
    register(model)
    optimizer = wrap(model)
    assert not optimizer.companion[0]._forward_hooks
    fit(optimizer, batches(1))
    assert optimizer.logs()["penalty"] == 0
    fit(optimizer, batches(2))
    assert optimizer.logs()["penalty"] > 0


def test_a_built_in_function_is_no_hook_of_a_library():
    model = mlp()
    model[1].register_forward_hook(functools.partial(print, file=io.StringIO()))
    assert not wrap(model).companion[1]._forward_hooks


# ---- hooks on the outermost module -----------------------------------------------------------------------------------


def outer_pre(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def outer_output(model):
    """It comes after the penalty's place: both networks are held before it."""
    model.register_forward_hook(lambda module, args, output: output + 1.0)


@pytest.mark.parametrize(("change", "order"), [(outer_pre, "before"), (outer_pre, "after"), (outer_output, "after")])
def test_the_companion_gets_the_inputs_that_the_models_pre_hooks_have_made(change, order):
    model = mlp()
    if order == "before":
        change(model)
    optimizer = wrap(model)
    assert not optimizer.companion._forward_pre_hooks  # the copy is made now
    if order == "after":
        change(model)
    fit(optimizer, batches(1))
    assert optimizer.logs()["penalty"] == 0
