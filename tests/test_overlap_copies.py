"""overlap=True in copies, pickles and checkpoints, also of a moment at which the companion is at work."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, snapshot, threads_of_forwards

TOTAL, BREAK = 8, 4
MOMENTS = ["after a step", "after a forward", "within an accumulation"]
CHANGES = [*((True, True, moment) for moment in MOMENTS), (True, False, MOMENTS[1]), (False, True, MOMENTS[0])]


def build(overlap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES)).double()
    return DCLOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, overlap=overlap, weight=1.0)


def run(optimizer, first, last, moment=None, save=None):
    """Train on three micro-batches a step; at a moment of the last step, save something."""
    for step, (x, y) in enumerate(batches(TOTAL)):
        if first <= step < last:
            torch.manual_seed(step)
            optimizer.zero_grad()
            for part, (rows, labels) in enumerate(zip(x.tensor_split(3), y.tensor_split(3), strict=True)):
                loss = F.cross_entropy(optimizer.model(rows), labels) / 3
                if step == last - 1 and part == 1 and moment == "after a forward":
                    save()
                loss.backward()
                if step == last - 1 and part == 1 and moment == "within an accumulation":
                    save()
            optimizer.step()
    if moment == "after a step":
        save()
    return optimizer


def steps_saved(moment):
    return BREAK if moment == "after a step" else BREAK - 1


@pytest.mark.parametrize(("before", "after", "moment"), CHANGES)
def test_a_checkpoint_resumes_bit_for_bit(before, after, moment):
    """Batch norm has seen the part of the step that is done again; its statistics alone tell."""
    file = io.BytesIO()
    half = build(before)

    def save():
        torch.save({"model": half.model.state_dict(), "optimizer": half.state_dict()}, file)

    run(half, 0, BREAK, moment, save)
    file.seek(0)
    state, again = torch.load(file, weights_only=True), build(after)
    run(again, 0, 1)  # on its way elsewhere
    F.cross_entropy(again.model(torch.ones(4, FEATURES).double()), torch.zeros(4, dtype=torch.long)).backward()
    again.model.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    with threads_of_forwards() as names:
        run(again, steps_saved(moment), TOTAL)
    assert any(name.startswith("dcl_optim") for name in names) == after
    expected = snapshot(run(build(False), 0, TOTAL))
    assert_same(without_statistics(snapshot(again)), without_statistics(expected))
    if moment == "after a step":
        assert_same(snapshot(again), expected)


def without_statistics(found):
    if not isinstance(found, dict):
        return found
    return {key: without_statistics(value) for key, value in found.items() if key not in STATISTICS}


STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def by_pickle(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


COPIES = [*((moment, copy.deepcopy) for moment in MOMENTS), (MOMENTS[1], by_pickle)]


@pytest.mark.parametrize(("moment", "copied"), COPIES)
def test_a_copy_and_its_original_both_go_on(moment, copied):
    original, copies = build(True), []
    run(original, 0, BREAK, moment, lambda: copies.append(copied(original)))
    (again,) = copies
    assert again.forecaster is not original.forecaster
    run(original, BREAK, TOTAL)
    run(again, steps_saved(moment), TOTAL)
    expected = snapshot(run(build(False), 0, TOTAL))
    assert_same(snapshot(original), expected)
    assert_same(without_statistics(snapshot(again)), without_statistics(expected))


def test_a_copy_has_a_thread_of_its_own_and_the_original_keeps_its(new_threads):
    original = run(build(True), 0, 2)
    (its,) = new_threads()
    again = copy.deepcopy(original)
    assert new_threads() == [its]
    run(again, 2, 5)
    assert len(new_threads()) == 2
    again.detach()
    assert new_threads() == [its]
    original.detach()
    assert new_threads() == []
