"""The prototypes as an object: what users read, what is saved and copied, and the memory of many classes."""

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

from dcl_optim import DCPOptimizer
from dcl_optim.departures import Departures
from dcl_optim.table import Table
from tests.dcp_forms import CLASSES, all_of, batches, form, many, network, train, wrap
from tests.helpers import assert_same

__all__ = ["form", "many"]  # fixtures
KEY = "dcl_optim.DCPOptimizer"


def trained(steps: int = 5, criterion: nn.Module | None = None):
    model, criterion = network(), criterion or nn.CrossEntropyLoss()
    optimizer = wrap(model, criterion=criterion)
    train(model, optimizer, batches(steps), criterion)
    return model, optimizer, criterion


def read_back(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- what users read -------------------------------------------------------------------------------------------------


def test_all_prototypes_and_those_of_some_classes_are_copies_of_the_same(form):
    model, optimizer, criterion = trained()
    some = torch.tensor([3, 11, 0, 3])
    everything, asked = optimizer.prototypes, optimizer.prototypes_of(some)
    assert everything.shape == (CLASSES, CLASSES)
    assert torch.equal(everything[some], asked)
    assert not asked[1].any()
    assert optimizer.forecaster.seen[some].tolist() == [True, False, True, True]
    before = everything.clone(), asked.clone()
    train(model, optimizer, batches(3, seed=2), criterion)
    assert_same((everything, asked), before)
    assert not torch.equal(optimizer.prototypes, everything)


def test_the_prototypes_of_very_many_classes_are_refused_as_a_whole():
    model = nn.Linear(1, 1)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 100_000, weight=1.0, alpha=0.6)
    with pytest.raises(RuntimeError, match=r"100000 classes would take 37 GiB; prototypes_of\(classes\)"):
        _ = optimizer.prototypes
    assert optimizer.prototypes_of(torch.tensor([99_999])).shape == (1, 100_000)


# ---- states and copies -----------------------------------------------------------------------------------------------


def test_a_state_that_is_held_does_not_change(form):
    model, optimizer, criterion = trained()
    held = optimizer.state_dict()[KEY]
    before, seen = copy.deepcopy(held), optimizer.forecaster.seen.sum()
    train(model, optimizer, batches(9, seed=2), criterion)
    assert optimizer.forecaster.seen.sum() > seen
    assert_same(held, before)


def test_a_loaded_state_is_not_written_to(form):
    model, optimizer, criterion = trained()
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state[KEY])
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(3, seed=2), criterion)
    assert_same(state[KEY], before)


@pytest.mark.parametrize("way", ["state", "deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(form, way):
    model, optimizer, criterion = trained()
    if way == "state":
        again, second, other = network(seed=4), None, nn.CrossEntropyLoss()
        second = wrap(again, criterion=other)
        again.load_state_dict(model.state_dict())
        second.load_state_dict(read_back(optimizer.state_dict()))
    elif way == "deepcopy":
        again, second, other = copy.deepcopy((model, optimizer, criterion))
    else:
        again, second, other = pickle.loads(pickle.dumps((model, optimizer, criterion)))
    for net, wrapped, loss in ((model, optimizer, criterion), (again, second, other)):
        train(net, wrapped, batches(6, seed=2), loss)
    assert_same(model, again)
    assert_same(all_of(optimizer), all_of(second))


def test_a_copy_between_backward_and_step_learns_the_same(form):
    model, optimizer, criterion = trained()
    ((x, y),) = batches(1, seed=6)
    criterion(model(x), y).backward()
    _, second = copy.deepcopy((model, optimizer))  # torch copies parameters without their gradients
    for wrapped in (optimizer, second):
        wrapped.step()
    assert_same(all_of(optimizer), all_of(second))
    assert not torch.equal(all_of(optimizer), all_of(trained()[1]))


def test_an_earlier_state_takes_back_what_came_after_it(form):
    model, optimizer, criterion = trained(2)
    state, before = copy.deepcopy(optimizer.state_dict()), all_of(optimizer)
    train(model, optimizer, batches(9, seed=2), criterion)
    assert optimizer.forecaster.seen.sum() > 8
    optimizer.load_state_dict(state)
    assert_same(all_of(optimizer), before)
    assert optimizer.forecaster.seen.sum() == 5


def test_a_state_of_many_classes_holds_the_rows_of_those_seen(many):
    _, optimizer, _ = trained(2)
    classes, rows = optimizer.state_dict()[KEY]["forecaster"]["table"]
    assert classes.tolist() == sorted({int(k) for _, y in batches(2) for k in y}) == [0, 1, 2, 3, 4]
    assert_same(rows, optimizer.prototypes_of(classes))
    assert rows.shape == (5, CLASSES)


@pytest.mark.parametrize("saved_with", ["few", "many"])
def test_either_form_loads_the_other_ones_state(form, saved_with):
    _, optimizer, _ = trained()
    classes, rows = optimizer.forecaster._table.contents()
    states = {
        "few": {"values": optimizer.prototypes, "seen": optimizer.forecaster.seen.clone()},
        "many": {"table": (classes, rows)},
    }
    second = wrap(network())
    second.forecaster.check_state(states[saved_with])
    second.forecaster.load_state_dict(states[saved_with])
    assert_same(all_of(second), all_of(optimizer))
    assert_same(second.forecaster.seen, optimizer.forecaster.seen)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state of the prototypes does not fit: missing \['seen', 'values'\]"),
        ({"values": torch.zeros(3, 3), "seen": torch.zeros(3)}, r"shape \(3, 3\) for 'values', expected \(12, 12\)"),
        ({"table": (torch.tensor([0]), torch.zeros(1, 3))}, r"shape \(1, 3\) for 'rows', expected \(1, 12\)"),
        ({"table": (torch.tensor([0]), torch.zeros(2, 12))}, r"shape \(2, 12\) for 'rows', expected \(1, 12\)"),
        ({"table": (torch.tensor([12]), torch.zeros(1, 12))}, r"names classes twice or outside of 0..11"),
        ({"table": (torch.tensor([2, 2]), torch.zeros(2, 12))}, r"names classes twice or outside of 0..11"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(form, state, message):
    _, optimizer, _ = trained()
    whole = optimizer.state_dict()
    before = copy.deepcopy(whole[KEY])
    whole[KEY] = {"steps": 1, "forecaster": state}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(whole)
    assert_same(optimizer.state_dict()[KEY], before)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")
def test_distributed_checkpoints_load_into_a_fresh_optimizer(form, tmp_path):
    """Of many classes a fresh optimizer has no rows yet: the saved ones have another size."""
    model, optimizer, _ = trained()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    again = network(seed=3)
    second = wrap(again, criterion=nn.CrossEntropyLoss())
    states = dict(zip(("model", "optimizer"), get_state_dict(again, second), strict=True))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(again, second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert_same(all_of(second), all_of(optimizer))
    assert_same(second.forecaster.seen, optimizer.forecaster.seen)


def test_a_model_that_is_widened_between_backward_and_step(form):
    results = []
    for widened in (True, False):
        model = network(dtype=torch.float32 if widened else torch.float64)
        criterion = nn.CrossEntropyLoss()
        optimizer = wrap(model, criterion=criterion)
        (x, y), (x_2, y_2) = batches(2)
        train(model, optimizer, [(x.to(model[0].weight.dtype), y)], criterion)
        criterion(model(x.to(model[0].weight.dtype)), y).backward()
        model.double()
        criterion(model(x_2), y_2).backward()
        optimizer.step()
        results.append(all_of(optimizer))
        assert optimizer.prototypes.dtype == torch.float64
    assert_same(*results, rtol=1e-5, atol=1e-6)


# ---- memory ----------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest result of any operation has."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("reduction", ["mean", "per_class"])
def test_no_tensor_is_larger_than_the_logits_or_the_classes_seen(reduction):
    count, size = 20_000, 6
    torch.manual_seed(0)
    model, criterion = nn.Linear(2, count), nn.CrossEntropyLoss(ignore_index=7)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DCPOptimizer(base, model, count, criterion=criterion, reduction=reduction, weight=1.0, alpha=0.6)
    labels = torch.randint(count, (3, size)).index_fill_(1, torch.tensor([0]), 7)
    with LargestTensor() as largest:
        for y in labels.repeat(2, 1):
            train(model, optimizer, [(torch.randn(size, 2), y)], criterion)
            optimizer.state_dict()
    seen = 3 * (size - 1)
    assert optimizer.forecaster.seen.sum() == seen
    assert largest.numbers <= 2 * seen * count
    assert count * seen <= optimizer.forecaster._table.nbytes / 4 <= 2 * count * (seen + 1)


def test_a_table_grows_by_doubling_and_keeps_its_rows(many):
    table = Table(40, torch.zeros((), dtype=torch.float64))
    expected, capacities = torch.zeros(40, 40, dtype=torch.float64), []
    for k in torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist():
        table.admit(torch.zeros(41).index_fill_(0, torch.tensor([k, 40]), 1.0))
        table.add(torch.tensor([k, 40]), torch.tensor([[k + 1.0], [0.0]], dtype=torch.float64).expand(2, 40))
        expected[k] = k + 1.0
        assert_same(table.look_up(torch.arange(40)), expected)
        assert not table.look_up(torch.tensor([40])).any()
        capacities.append(table.nbytes // (40 * 8))
    assert sorted(set(capacities)) == [2, 4, 8, 16, 32, 41]
    assert table.complete
    assert_same(table.to(torch.zeros(())).look_up(torch.arange(40)), expected.float())


def test_once_a_class_leaves_one_sum_a_class_and_the_totals_as_they_are():
    """Else atomic additions, in whatever order they come, would round to other bits on each process."""
    torch.manual_seed(0)
    classes = torch.randint(6, (30,))
    some = Departures(classes, torch.randn(30, 5, dtype=torch.float64), torch.rand(30, dtype=torch.float64))
    once = some.once_a_class(5)  # class 5 stands for none
    for k in classes.unique():
        assert (once.counts[classes == k] != 0).sum() == (once.sums[classes == k] != 0).any(1).sum() == 1
        assert_same(once.sums[classes == k].sum(0), some.sums[classes == k].sum(0), atol=1e-14)
        assert_same(once.counts[classes == k].sum(), some.counts[classes == k].sum(), atol=1e-14)
