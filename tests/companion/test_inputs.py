"""What the model is called with reaches the companion without the script's graph, and as the model got it."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, UserDict, namedtuple
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import distances
from tests import reference
from tests.helpers import FEATURES, assert_same, assert_same_networks, batches, fit, mlp, one, sgd, wrap
from tests.reference import NEAR, train_by_hand

DATA = list(batches(5))

# ---- inputs with a graph ---------------------------------------------------------------------------------------------


class Batch:
    def __init__(self, x):
        self.x = x


Named = namedtuple("Named", "x")


def attribute(batch):
    return batch.x


FORMS = {
    "mapping": (lambda x: OrderedDict(x=x), lambda batch: batch["x"]),
    "named tuple": (Named, attribute),
    "nested": (lambda x: [None, {"deep": (Named(x), "text", 3)}], lambda batch: batch[1]["deep"][0].x),
}


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.net, self.read = mlp(), read
        self.seen = []

    def forward(self, batch):
        self.seen.append(batch)
        return self.net(self.read(batch))


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_inside_the_inputs_is_the_models_alone(form):
    """A graph, or a leaf; the companion gets what the model got, and the script's own inputs stay as they are."""
    pack, read = FORMS[form]

    def trained(weight):
        model = Reading(read)
        prompt = nn.Parameter(torch.full((FEATURES,), 0.1, dtype=torch.float64))
        leaves = [prompt]
        optimizer = sgd(model) if weight is None else wrap(model, weight=weight)
        given = []
        for x, y in batches(3):
            leaves.append(nn.Parameter(x))
            for inputs in (torch.tanh(x * prompt), leaves[-1]):
                given.append(pack(inputs))
                optimizer.zero_grad()
                F.cross_entropy(model(given[-1]), y).backward()
                optimizer.step()
        return model, leaves, optimizer, given

    (alone, expected, *_), (model, leaves, optimizer, given) = trained(None), trained(0.0)
    assert_same(model, alone)
    assert_same([leaf.grad for leaf in leaves], [leaf.grad for leaf in expected])
    for mine, models, theirs in zip(given, model.seen, optimizer.companion.seen, strict=True):
        assert models is mine
        assert type(theirs) is type(mine)
        assert read(theirs) is not read(mine)
        assert read(theirs).requires_grad, "a reentrant checkpoint would skip its block without"
        assert read(theirs).data_ptr() != read(mine).data_ptr()


def first_of(batch):
    return next(iter(vars(batch[0]).values() if isinstance(batch[0], Batch) else batch[0]))


@pytest.mark.parametrize("pack", [Batch, lambda x: {x}], ids=["object", "set"])
def test_of_what_is_not_looked_into_there_is_a_shallow_copy(pack):
    model = Reading(first_of)
    optimizer = wrap(model)
    given = pack(torch.tanh(one()[0]))
    model([given])
    theirs = optimizer.companion.seen[0]
    assert theirs[0] is not given
    assert first_of(theirs) is first_of([given])
    fit(optimizer, [([pack(x)], y) for x, y in DATA])
    hand = train_by_hand(mlp(), sgd, DATA)
    assert_same((model.net, optimizer.companion.net), hand, **NEAR)


def test_a_graph_inside_what_is_not_looked_into_is_refused_at_the_first_prediction():
    """The companion's backward pass would bring gradients to what made the input."""
    model = Reading(attribute)
    optimizer = wrap(model)
    prompt = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"would train a tensor of shape \(6,\), which is not its own"):
        model(Batch(one()[0] * prompt))
    optimizer.detach()


# ---- inputs that the forward pass changes ----------------------------------------------------------------------------


class Centered(nn.Module):
    """Writes to its input before its first layer, which is then computed from what was written."""

    def __init__(self, change, from_step=0):
        super().__init__()
        self.net, self._change = mlp(), change
        self._left = from_step

    def forward(self, x):
        self._left -= 1
        if self._left < 0:
            self._change(x)
        return self.net(x)


class Scores(nn.Module):
    """Writes its logits into its input, as the modules of sentence-transformers and GraphGym do."""

    def __init__(self, place="scores"):
        super().__init__()
        self.net, self.place = mlp(), place

    def forward(self, batch, inside=None):
        values = vars(inside or batch)
        values = values.get("data", values)  # of a UserDict
        values[self.place] = self.net(values["x"])
        return inside or batch


@dataclasses.dataclass
class Record:
    x: Tensor
    scores: Tensor | None = None


KINDS = {
    "UserDict": lambda x: UserDict(x=x),
    "object": Batch,
    "dataclass": Record,
}


@pytest.mark.parametrize("place", ["scores", "x"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_may_write_its_logits_into_its_input(kind, place):
    """The companion's own copy is as the input was before: also where features are replaced, and as a keyword."""

    def logits_of(output):
        return output[place] if kind == "UserDict" else getattr(output, place)

    model, hand = Scores(place), mlp()
    companion = copy.deepcopy(hand)
    optimizer = wrap(model, logits=logits_of)
    base, second = sgd(hand), sgd(companion)
    for number, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        batch = KINDS[kind](x)
        output = model(batch) if number % 2 else model([], inside=batch)
        F.cross_entropy(logits_of(output), y).backward()
        optimizer.step()
        reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, distances.mse)
    assert_same(model.net, hand, **NEAR)
    assert_same(optimizer.companion.net, companion, **NEAR)


def test_what_cannot_be_copied_is_handed_on_itself():
    class Locked(Batch):
        def __reduce_ex__(self, protocol):
            raise TypeError("cannot pickle 'Locked' object")

    model = Reading(attribute)
    optimizer = wrap(model)
    given = Locked(one()[0])
    model(given)
    assert optimizer.companion.seen == [given]


class Popping(nn.Module):
    """Takes the labels out of its batch, as models with a loss of their own do."""

    def __init__(self, pops=True):
        super().__init__()
        self.net, self._pops = mlp(), pops

    def forward(self, batch):
        y = batch.pop("labels") if self._pops else batch["labels"]
        x = batch["inputs"].pop() if self._pops else batch["inputs"][-1]
        logits = self.net(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}


CHANGES = {
    "sub_": lambda x: x.sub_(0.5),
    "item": lambda x: x.__setitem__((slice(None), 0), 3.0),
}


@pytest.mark.parametrize("from_step", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_inputs_that_the_forward_edits_in_place_are_the_companions_as_the_model_got_them(change, from_step):
    model, expected = Centered(CHANGES[change], from_step), mlp()
    optimizer, other = wrap(model), wrap(expected)
    fit(optimizer, [(x.clone(), y) for x, y in DATA])
    edited = [(x.clone(), y) for x, y in DATA]
    for x, _ in edited[from_step:]:
        CHANGES[change](x)
    fit(other, edited)
    assert_same(model.net, expected)
    assert_same(optimizer.companion.net, other.companion)


def test_what_the_forward_takes_out_of_its_batch_is_there_for_the_companion():
    found = []
    for pops in (True, False):
        model = Popping(pops)
        optimizer = wrap(model)
        for x, y in DATA:
            optimizer.zero_grad()
            model({"labels": y, "inputs": [x]})["loss"].backward()
            optimizer.step()
        assert optimizer.logs()["penalty"] > 0
        found.append(optimizer)
    assert_same_networks(*found)


def test_an_input_that_is_refilled_before_the_backward_pass_is_the_companions_as_it_was():
    """The script's hooks copy what the model saves, and not what the companion does."""
    found = []
    for refills in (True, False):
        model = mlp()
        optimizer = wrap(model)
        for x, y in batches(4):
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
                loss = F.cross_entropy(model(x), y)
            if refills:
                x.zero_()
            loss.backward()
            optimizer.step()
        found.append(optimizer.companion)
    assert_same(*found)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False])
def test_a_forward_pass_in_the_middle_of_another_threads_is_an_error(ends: bool) -> None:
    """The companion would get the draws of one with the inputs of the other; whether the other one ends, or fails."""
    model = mlp()
    others: list[Future[Tensor]] = []

    def call_in_another_thread(module, args, output):
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as pool:
                others.append(pool.submit(model, DATA[1][0]))
        elif not ends:
            raise ZeroDivisionError

    model[1].register_forward_hook(call_in_another_thread)
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match=r"two threads call the model .*\n  Fix: give each thread"):
        model(DATA[0][0])
    assert (others[0].exception() is None) is ends
    optimizer.detach()
