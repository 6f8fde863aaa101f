"""overlap=True where it cannot keep its word: an error that says so, and no trace of the attempt."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dcl_optim import DCLOptimizer
from tests.helpers import (
    DRAWS,
    assert_same,
    batch_norm_net,
    batches,
    intra_op_threads,
    mlp,
    one,
    sgd,
    snapshot,
    train,
    wrap,
)


class Checkpointing(nn.Module):
    def __init__(self, reentrant, dropout=0.0):
        super().__init__()
        self.body, self.drop, self._reentrant = batch_norm_net(), nn.Dropout(dropout), reentrant

    def forward(self, x):
        # what needs no gradient, a reentrant checkpoint leaves alone
        return self.body[3](checkpoint(self._inner, self.body[0](x), use_reentrant=self._reentrant))

    def _inner(self, hidden):
        return self.drop(self.body[2](hidden))


def refused(optimizer, data, message):
    """The first step or the second is refused; without overlap the script goes on, with all of its threads."""
    with intra_op_threads(4):
        with pytest.raises(RuntimeError, match=message):
            train(optimizer.model, optimizer, data)
        optimizer.zero_grad()
        assert torch.get_num_threads() == 4
    optimizer.detach()
    again = DCLOptimizer(sgd(optimizer.model), optimizer.model, weight=1.0)
    train(optimizer.model, again, batches(2))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # where the companion does not learn
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing_inside_the_model(reentrant, every):
    optimizer = wrap(Checkpointing(reentrant), overlap=True, companion_every=every)
    refused(optimizer, batches(6), r"overlap=True.*activation checkpointing.*overlap=False")


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing_inside_a_model_that_draws_runs_serially_anyway(reentrant):
    found = []
    for overlap in (False, True):
        model = Checkpointing(reentrant, dropout=0.3)
        optimizer = wrap(model, overlap=overlap)
        torch.manual_seed(7)
        with pytest.warns(UserWarning, match=DRAWS) if overlap else nullcontext():
            train(model, optimizer, batches(4))
        found.append(snapshot(optimizer))
    assert_same(*found)


def test_activations_kept_elsewhere_inside_the_model():
    class Offloading(nn.Sequential):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    refused(wrap(Offloading(*mlp()), overlap=True), batches(3), r"recomputes or offloads.*overlap=False")


class Writing(nn.Module):
    """Scales its input in place, once it is told to."""

    def __init__(self):
        super().__init__()
        self.body, self.writes = mlp(), False

    def forward(self, x, given=None):
        x = x if given is None else given["x"][0]
        if self.writes:
            x.mul_(1.0)
        return self.body(x)


@pytest.mark.parametrize(("who", "nested"), [("model", True), ("companion", False)])
def test_inputs_that_are_changed_in_place(who, nested):
    optimizer = wrap(Writing(), overlap=True)
    model = optimizer.model
    x, y = one()

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(None, given={"x": (x,)}) if nested else model(x), y).backward()
        optimizer.step()

    step()
    (model if who == "model" else optimizer.companion).writes = True
    before = copy.deepcopy((model.state_dict(), optimizer.companion.state_dict()))
    with pytest.raises(RuntimeError, match=r"overlap=True.*inputs were changed.*overlap=False"):
        step()
    assert_same((model.state_dict(), optimizer.companion.state_dict()), before)
    (model if who == "model" else optimizer.companion).writes = False
    step()


def test_inputs_that_a_hook_replaces():
    optimizer = wrap(mlp(), overlap=True)
    handle = optimizer.model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    refused_by_hook = r"overlap=True.*pre-hook.*overlap=False"
    train(optimizer.model, optimizer, batches(1))  # serial: the companion is given what the model was
    with pytest.raises(RuntimeError, match=refused_by_hook):
        train(optimizer.model, optimizer, batches(1))
    handle.remove()
    train(optimizer.model, optimizer, batches(1))


def test_inputs_that_an_earlier_hook_replaces_are_those_of_both():
    found = []
    for overlap in (False, True):
        model = mlp()
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        optimizer = wrap(model, overlap=overlap)
        train(model, optimizer, batches(4))
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)
