"""What the model is called with: the companion's backward ends at its own parameters, whatever holds the inputs."""

from __future__ import annotations

import copy
import re
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcl_optim import functional, reference
from dcl_optim.inputs import is_open
from tests.helpers import FEATURES, assert_same, batches, mlp, sgd, wrap


@dataclass
class Data:
    x: Tensor


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


Named = namedtuple("Named", "x")

FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Data, lambda batch: batch.x),
    "object": (Batch, lambda batch: batch.x),
    "mapping": (lambda x: UserDict({"x": x}), lambda batch: batch["x"]),
    "object in a list": (lambda x: [None, {"deep": Batch(x)}], lambda batch: batch[1]["deep"].x),
    "dict": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "named tuple": (Named, lambda batch: batch.x),
    "set": (lambda x: {x}, lambda batch: next(iter(batch))),
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.net, self.read, self.checkpointed = mlp(), read, checkpointed

    def forward(self, batch: Any) -> Tensor:
        x = self.read(batch)
        return checkpoint(self.net, x, use_reentrant=True) if self.checkpointed else self.net(x)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_inside_the_inputs_is_the_models_alone(form: str) -> None:
    pack, read = FORMS[form]

    def trained(weight: float | None) -> tuple[nn.Module, Tensor]:
        model = Reading(read)
        prompt = nn.Parameter(torch.full((FEATURES,), 0.1, dtype=torch.float64))
        optimizer = sgd(model) if weight is None else wrap(model, weight=weight)
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(pack(torch.tanh(x * prompt))), y).backward()
            optimizer.step()
        return model, prompt.grad

    (alone, expected), (model, gradient) = trained(None), trained(0.0)
    assert_same(model, alone)
    assert_same(gradient, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_leaf_inside_the_inputs_gets_the_models_gradient_alone(form: str) -> None:
    pack, read = FORMS[form]
    gradients = []
    for weight in (None, 0.0):
        model = Reading(read)
        optimizer = sgd(model) if weight is None else wrap(model, weight=weight)
        for x, y in batches(3):
            optimizer.zero_grad()
            prompt = nn.Parameter(x)
            F.cross_entropy(model(pack(prompt)), y).backward()
            optimizer.step()
        gradients.append(prompt.grad)
    assert_same(*gradients)


def test_a_companion_fed_by_objects_is_the_reference() -> None:
    model, hand = Reading(*FORMS["object"][1:]), mlp()
    companion = copy.deepcopy(hand)
    optimizer, base, chaser = wrap(model), sgd(hand), sgd(companion)
    for x, y in batches(5):
        optimizer.zero_grad()
        F.cross_entropy(model(Batch(x)), y).backward()
        optimizer.step()
        reference.dcl_step(hand, companion, base, chaser, x, y, F.cross_entropy, functional.mse)
    assert_same(model.net, hand, rtol=1e-10, atol=1e-12)
    assert_same(optimizer.companion.net, companion, rtol=1e-10, atol=1e-12)


def test_a_reentrant_checkpoint_takes_objects_too() -> None:
    """Their tensors need a graph for it; the model's loss then has to come first."""
    found = []
    for checkpointed in (False, True):
        model = Reading(FORMS["object"][1], checkpointed)
        optimizer = wrap(model)
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(Batch(x.requires_grad_())), y).backward()
            optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (((torch.zeros(1),), {}), True),
        ([None, 1, 2.0, True, "text", b"", torch.float32, torch.device("cpu"), {"a": (torch.zeros(1),)}], True),
        (Named(torch.zeros(1)), True),
        (UserDict(), False),
        ([re.compile("")], False),
        ({"a": [Batch(torch.zeros(1))]}, False),
    ],
)
def test_what_is_looked_into(tree: Any, expected: bool) -> None:
    assert is_open(tree) is expected
