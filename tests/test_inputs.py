"""What the model is called with reaches the companion without the script's graph, where tensors can be found in it."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcl_optim import distances, reference
from tests.helpers import FEATURES, assert_same, batches, mlp, one, sgd, train, wrap


@dataclass
class Data:
    x: Tensor
    name: str = "rows"


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass
class Computing:
    """Its fields are no arguments of its constructor, which would compute them again from others."""

    given: Tensor
    x: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x = self.given


class Model(OrderedDict[str, Any]):
    """A dictionary whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


Named = namedtuple("Named", "x")


def attribute(batch: Any) -> Tensor:
    return batch.x


def item(batch: Any) -> Tensor:
    return batch["x"]


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Data, attribute),
    "frozen dataclass": (Frozen, attribute),
    "dataclass with a constructor": (Computing, attribute),
    "dict": (lambda x: {"x": x}, item),
    "mapping": (lambda x: UserDict({"x": x}), item),
    "dictionary of a class": (lambda x: Model(x=x), attribute),
    "named tuple": (Named, attribute),
    "nested": (lambda x: [None, {"deep": (Data(x), "text", 3)}], lambda batch: batch[1]["deep"][0].x),
    "dataclass in a dataclass": (lambda x: Frozen([Data(x)]), lambda batch: batch.x[0].x),
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.net, self.read, self.checkpointed = mlp(), read, checkpointed
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> Tensor:
        self.seen.append(batch)
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


@pytest.mark.parametrize("form", FORMS)
def test_the_scripts_own_inputs_stay_as_they_are(form: str) -> None:
    pack, read = FORMS[form]
    model = Reading(read)
    optimizer = wrap(model)
    x, y = one()
    given = pack(torch.tanh(x.requires_grad_()))
    F.cross_entropy(model(given), y).backward()
    (theirs,) = optimizer.companion.seen
    assert model.seen[0] is given
    assert type(theirs) is type(given)
    assert read(given).grad_fn is not None
    assert read(theirs).grad_fn is None
    assert read(theirs).requires_grad, "a reentrant checkpoint would skip its block without"
    assert read(theirs).data_ptr() == read(given).data_ptr()


def test_a_dataclass_without_a_graph_is_handed_on_as_a_copy_with_the_same_tensors() -> None:
    model = Reading(attribute)
    optimizer = wrap(model)
    given = Data(one()[0])
    model(given)
    (theirs,) = optimizer.companion.seen
    assert type(theirs) is Data
    assert theirs is not given, "the model's forward may take away what the given one holds"
    assert attribute(theirs) is attribute(given)


def first_of(batch: list[Any]) -> Tensor:
    return next(iter(vars(batch[0]).values() if isinstance(batch[0], Batch) else batch[0]))


@pytest.mark.parametrize("pack", [Batch, lambda x: {x}], ids=["object", "set"])
def test_what_is_not_looked_into_is_handed_on_itself(pack: Callable[[Tensor], Any]) -> None:
    """A graph inside it is the script's affair."""
    model = Reading(first_of)
    optimizer = wrap(model)
    given = pack(torch.tanh(one()[0].requires_grad_()))
    model([given])
    assert optimizer.companion.seen[0][0] is given


@pytest.mark.parametrize("form", ["object", "dataclass", "mapping"])
def test_a_companion_fed_otherwise_than_by_tensors_is_the_reference(form: str) -> None:
    pack, read = {**FORMS, "object": (Batch, attribute)}[form]
    model, hand = Reading(read), mlp()
    companion = copy.deepcopy(hand)
    optimizer, base, chaser = wrap(model), sgd(hand), sgd(companion)
    for x, y in batches(5):
        optimizer.zero_grad()
        F.cross_entropy(model(pack(x)), y).backward()
        optimizer.step()
        reference.dcl_step(hand, companion, base, chaser, x, y, F.cross_entropy, distances.mse)
    assert_same(model.net, hand, rtol=1e-10, atol=1e-12)
    assert_same(optimizer.companion.net, companion, rtol=1e-10, atol=1e-12)


def test_a_fraction_of_a_dataclass() -> None:
    found = []
    for pack, read in (FORMS["dataclass"], FORMS["dict"]):
        model = Reading(read)
        optimizer = wrap(model, companion_fraction=0.5)
        train(model, optimizer, [(pack(x), y) for x, y in batches(3)])
        assert [len(read(seen)) for seen in optimizer.companion.seen] == [8, 8, 16] + [8] * 6  # the first is checked
        found.append((model.net.state_dict(), optimizer.companion.net.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("form", ["dataclass", "nested"])
def test_a_reentrant_checkpoint_inside_the_model(form: str) -> None:
    """Its inputs need a gradient for it, in the companion too."""
    pack, read = FORMS[form]
    found = []
    for checkpointed in (False, True):
        model = Reading(read, checkpointed)
        optimizer = wrap(model)
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(pack(x.requires_grad_())), y).backward()
            optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["BatchEncoding", "ModelOutput"])
def test_the_mappings_of_transformers(kind: str) -> None:
    import transformers

    if kind == "BatchEncoding":
        pack: Callable[[Tensor], Any] = lambda x: transformers.BatchEncoding({"last_hidden_state": x})  # noqa: E731
    else:
        from transformers.modeling_outputs import BaseModelOutput

        pack = lambda x: BaseModelOutput(last_hidden_state=x)  # noqa: E731
    model = Reading(lambda batch: batch["last_hidden_state"])
    optimizer = wrap(model)
    x, y = one()
    prompt = nn.Parameter(torch.full((FEATURES,), 0.1, dtype=torch.float64))
    given = pack(torch.tanh(x * prompt))
    F.cross_entropy(model(given), y).backward()
    optimizer.step()
    (theirs,) = optimizer.companion.seen
    assert type(theirs) is type(given)
    for read in (lambda batch: batch["last_hidden_state"], lambda batch: batch.last_hidden_state):
        assert read(given).grad_fn is not None
        assert read(theirs).grad_fn is None
