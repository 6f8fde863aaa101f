"""The prototypes as an object: what users read, what is saved and copied, and many classes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcl_optim import DCPOptimizer
from tests.dcp_forms import CLASSES, batches, network, train, wrap
from tests.helpers import assert_same

KEY = "dcl_optim.DCPOptimizer"


def trained(steps: int = 5):
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = wrap(model)
    train(model, optimizer, batches(steps), criterion)
    return model, optimizer, criterion


def read_back(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- what users read -------------------------------------------------------------------------------------------------


def test_prototypes_are_a_copy():
    model, optimizer, criterion = trained()
    held = optimizer.prototypes
    assert held.shape == (CLASSES, CLASSES)
    assert optimizer.forecaster.seen[[3, 11, 0]].tolist() == [True, False, True]
    assert held[3].any()
    assert not held[11].any()
    before = held.clone()
    train(model, optimizer, batches(3, seed=2), criterion)
    assert_same(held, before)
    assert not torch.equal(optimizer.prototypes, held)


@pytest.mark.parametrize(
    ("classes", "dtype", "size"),
    [
        (16_385, torch.float32, "1.0 GiB"),
        (16_385, torch.bfloat16, "1.0 GiB"),  # whose prototypes are float32
        (11_586, torch.float64, "1.0 GiB"),
        (100_000, torch.float32, "37.3 GiB"),
    ],
)
def test_so_many_classes_that_their_prototypes_would_take_more_than_a_gibibyte_are_refused(classes, dtype, size):
    model = nn.Linear(1, 1).to(dtype)
    before = copy.deepcopy(model.__dict__)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"num_classes={classes}.*would need {size}.*use DCLOptimizer"):
        DCPOptimizer(base, model, classes)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        assert model.__dict__[hooks] == before[hooks] == {}


@pytest.mark.parametrize(("classes", "dtype"), [(16_384, torch.float32), (11_585, torch.float64)])
def test_prototypes_of_up_to_a_gibibyte_are_not(classes, dtype):
    """On a device without memory."""
    model = nn.Linear(1, 1, device="meta", dtype=dtype)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, classes)
    assert optimizer.prototypes.shape == (classes, classes)


# ---- states and copies -----------------------------------------------------------------------------------------------


def test_a_state_that_is_held_does_not_change():
    model, optimizer, criterion = trained()
    held = optimizer.state_dict()[KEY]
    before, seen = copy.deepcopy(held), optimizer.forecaster.seen.sum()
    train(model, optimizer, batches(9, seed=2), criterion)
    assert optimizer.forecaster.seen.sum() > seen
    assert_same(held, before)


def test_a_loaded_state_is_not_written_to():
    model, optimizer, criterion = trained()
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state[KEY])
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(3, seed=2), criterion)
    assert_same(state[KEY], before)


@pytest.mark.parametrize("way", ["state", "deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(way):
    model, optimizer, criterion = trained()
    if way == "state":
        again, second, other = network(seed=4), None, nn.CrossEntropyLoss()
        second = wrap(again)
        again.load_state_dict(model.state_dict())
        second.load_state_dict(read_back(optimizer.state_dict()))
    elif way == "deepcopy":
        again, second, other = copy.deepcopy((model, optimizer, criterion))
    else:
        again, second, other = pickle.loads(pickle.dumps((model, optimizer, criterion)))
    for net, wrapped, loss in ((model, optimizer, criterion), (again, second, other)):
        train(net, wrapped, batches(6, seed=2), loss)
    assert_same(model, again)
    assert_same(optimizer.prototypes, second.prototypes)


def test_a_copy_between_backward_and_step_has_no_gradients_and_does_not_learn():
    model, optimizer, criterion = trained()
    ((x, y),) = batches(1, seed=6)
    criterion(model(x), y).backward()
    _, second = copy.deepcopy((model, optimizer))  # torch copies parameters without their gradients
    for wrapped in (optimizer, second):
        wrapped.step()
    assert_same(second.prototypes, trained()[1].prototypes)
    assert not torch.equal(optimizer.prototypes, second.prototypes)


def test_an_earlier_state_takes_back_what_came_after_it():
    model, optimizer, criterion = trained(2)
    state, before = copy.deepcopy(optimizer.state_dict()), optimizer.prototypes
    train(model, optimizer, batches(9, seed=2), criterion)
    assert optimizer.forecaster.seen.sum() > 8
    optimizer.load_state_dict(state)
    assert_same(optimizer.prototypes, before)
    assert optimizer.forecaster.seen.sum() == 5


def test_a_state_holds_all_prototypes_and_which_classes_were_seen():
    _, optimizer, _ = trained(2)
    state = optimizer.state_dict()[KEY]["forecaster"]
    assert state.keys() == {"values", "seen"}
    assert_same(state["values"], optimizer.prototypes)
    assert state["seen"].nonzero().flatten().tolist() == sorted({int(k) for _, y in batches(2) for k in y})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state of the prototypes does not fit: missing \['seen', 'values'\]"),
        ({"values": torch.zeros(3, 3), "seen": torch.zeros(3)}, r"shape \(3, 3\) for 'values', expected \(12, 12\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state, message):
    _, optimizer, _ = trained()
    whole = optimizer.state_dict()
    before = copy.deepcopy(whole[KEY])
    whole[KEY] = {"steps": 1, "forecaster": state}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(whole)
    assert_same(optimizer.state_dict()[KEY], before)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")
def test_distributed_checkpoints_load_into_a_fresh_optimizer(tmp_path):
    model, optimizer, _ = trained()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    again = network(seed=3)
    second = wrap(again)
    states = dict(zip(("model", "optimizer"), get_state_dict(again, second), strict=True))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(again, second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert_same(second.prototypes, optimizer.prototypes)
    assert_same(second.forecaster.seen, optimizer.forecaster.seen)


def test_a_model_that_is_widened_between_backward_and_step():
    results = []
    for widened in (True, False):
        model = network(dtype=torch.float32 if widened else torch.float64)
        criterion = nn.CrossEntropyLoss()
        optimizer = wrap(model)
        (x, y), (x_2, y_2) = batches(2)
        train(model, optimizer, [(x.to(model[0].weight.dtype), y)], criterion)
        criterion(model(x.to(model[0].weight.dtype)), y).backward()
        model.double()
        criterion(model(x_2), y_2).backward()
        optimizer.step()
        results.append(optimizer.prototypes)
        assert optimizer.prototypes.dtype == torch.float64
    assert_same(*results, rtol=1e-5, atol=1e-6)


# ---- many classes ----------------------------------------------------------------------------------------------------


class NoPassOverAll(TorchDispatchMode):
    """Refuses operations on tensors of a size or more, but for reading, adding to and setting some of their rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        rows_only = function.is_view or function.overloadpacket.__name__.startswith("index")
        whole = [] if rows_only else [args, kwargs]
        if function.overloadpacket.__name__ not in ("index_add_", "index_copy_", "index_put_"):
            whole.append(() if function.is_view else result)
        large = [t for t in tree_leaves(whole) if isinstance(t, torch.Tensor) and t.numel() >= self._size]
        assert not large, f"{function} on {[tuple(t.shape) for t in large]}"
        return result


def labels_of(kind: str, y: torch.Tensor, classes: int) -> torch.Tensor:
    if kind != "soft":
        return y
    return 0.75 * nn.functional.one_hot(y, classes) + 0.25 * nn.functional.one_hot(y.flip(0), classes)


@pytest.mark.parametrize("kind", ["hard", "soft", "per_class"])
def test_a_step_passes_over_the_prototypes_of_its_own_classes_only(kind):
    classes, size = 1000, 6
    torch.manual_seed(0)
    model, criterion = nn.Linear(2, classes), nn.CrossEntropyLoss(ignore_index=7 if kind == "hard" else -100)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    reduction = "per_class" if kind == "per_class" else "mean"
    optimizer = DCPOptimizer(base, model, classes, reduction=reduction, alpha=0.6, loss_scale=1.0)
    labels = torch.randint(classes, (3, size)).index_fill_(1, torch.tensor([0]), 7)
    with NoPassOverAll(classes * classes):
        for y in labels.repeat(2, 1):
            optimizer.zero_grad()
            for rows in torch.arange(size).split([4, 2]):
                target = labels_of(kind, y, classes)[rows]
                if kind == "soft":
                    optimizer.set_targets(target)
                criterion(model(torch.randn(len(rows), 2)), target).backward()
            optimizer.step()
    assert optimizer.forecaster.seen.sum() == 3 * (size - 1) + int(kind != "hard")
    assert optimizer.penalty > 0
