"""What models return besides logits, and what leaves the script: copies, pickles, traces, exports."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from dcl_optim import DCPOptimizer
from tests.helpers import CLASSES, assert_same, backward, batches, mlp, one, sgd, train, wrap


class Network(nn.Module):
    """A class of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)


# ---- copies and pickles of a wrapped module --------------------------------------------------------------------------

SAFE = [Network, nn.Sequential, nn.Linear, nn.Tanh, nn.CrossEntropyLoss]
COPIES = {
    "torch.save, weights_only": lambda module: loaded(saved(module), weights_only=True),
    "torch.save": lambda module: loaded(saved(module), weights_only=False),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "deepcopy": copy.deepcopy,
}


def saved(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    return stream.getvalue()


def loaded(data, **options):
    with torch.serialization.safe_globals(SAFE):
        return torch.load(io.BytesIO(data), **options)


def tables(module):
    return {name: dict(value) for name, value in vars(module).items() if "_hooks" in name}


def doubled(module, args, output):
    return 2 * output


@pytest.mark.parametrize("form", COPIES)
def test_a_copy_of_a_wrapped_module_has_no_hook_of_ours(form):
    model, criterion = Network(), nn.CrossEntropyLoss()
    plain = tables(Network())
    first = DCPOptimizer(sgd(model), model, CLASSES, criterion=criterion)
    second = DCPOptimizer(sgd(other := Network()), other, CLASSES, criterion=criterion)
    train(model, first, batches(2), criterion)
    for module in (model, criterion):
        copied = COPIES[form](module)
        assert {name: table for name, table in tables(copied).items() if table} == {}
        assert tables(copied).keys() == plain.keys()
    copied = COPIES[form](model)
    assert_same(copied, model)
    backward(copied, *one())
    assert first._regularizer.state.backwards == second._regularizer.state.backwards == 0
    train(model, first, batches(1, seed=2), criterion)  # the originals go on
    train(other, second, batches(1, seed=2), criterion)
    again = wrap(copied)
    train(copied, again, batches(2))
    assert again.penalty > 0


@pytest.mark.parametrize("form", list(COPIES)[1:])
def test_hooks_of_the_script_are_copied_and_their_handles_hold(form):
    model = Network()
    before = model.register_forward_hook(doubled)
    optimizer = wrap(model)
    after = model.register_forward_hook(doubled, always_call=True)
    copied, x = COPIES[form](model), one()[0]
    assert list(copied._forward_hooks.values()) == [doubled, doubled]
    assert torch.equal(copied(x), 4 * copied.body(x))
    before.remove()
    after.remove()
    assert torch.equal(model(x), model.body(x))
    assert optimizer._regularizer.forwards == 1
    optimizer.detach()
    assert tables(COPIES[form](model)) == tables(Network())
