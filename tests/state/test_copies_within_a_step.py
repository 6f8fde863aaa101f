"""Copies, pickles and checkpoints of a moment between two steps, at which the companion's backward may be to come."""

import copy
import io

import pytest
import torch
from torch import nn

from tests.helpers import CLASSES, FEATURES, assert_same, batches, snapshot, through_pickle, wrap
from tests.reference import loss_by_the_line, loss_with_the_term

TOTAL, BREAK = 8, 4
MOMENTS = ["after a step", "after a forward", "within an accumulation"]
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES)).double()
    return wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def run(optimizer, loss_of, first, last, moment=None, save=None):
    """Train on three micro-batches a step; at a moment of the last step, save something."""
    for step, (x, y) in enumerate(batches(TOTAL)):
        if first <= step < last:
            torch.manual_seed(step)
            optimizer.zero_grad()
            for part, (rows, labels) in enumerate(zip(x.tensor_split(3), y.tensor_split(3), strict=True)):
                loss = loss_of(optimizer, rows, labels) / 3
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


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_checkpoint_resumes_bit_for_bit(moment):
    """Batch norm has seen the part of the step that is done again; its statistics alone tell."""
    file, half, loss_of = io.BytesIO(), build(), loss_by_the_line

    def save():
        torch.save({"model": half.model.state_dict(), "optimizer": half.state_dict()}, file)

    run(half, loss_of, 0, BREAK, moment, save)
    file.seek(0)
    state, again = torch.load(file, weights_only=True), build()
    run(again, loss_of, 0, 1)  # on its way elsewhere
    loss_of(again, torch.ones(4, FEATURES).double(), torch.zeros(4, dtype=torch.long)).backward()
    again.model.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    run(again, loss_of, steps_saved(moment), TOTAL)
    expected = snapshot(run(build(), loss_of, 0, TOTAL))
    assert_same(without_statistics(snapshot(again)), without_statistics(expected))
    if moment == "after a step":
        assert_same(snapshot(again), expected)


def without_statistics(found):
    if not isinstance(found, dict):
        return found
    return {key: without_statistics(value) for key, value in found.items() if key not in STATISTICS}


@pytest.mark.parametrize(
    ("moment", "copied", "loss_of"),
    [
        ("after a step", copy.deepcopy, loss_with_the_term),
        ("after a forward", copy.deepcopy, loss_by_the_line),
        ("after a forward", copy.deepcopy, loss_with_the_term),
        ("within an accumulation", copy.deepcopy, loss_with_the_term),
        ("within an accumulation", through_pickle, loss_by_the_line),
    ],
)
def test_a_copy_and_its_original_both_go_on(moment, copied, loss_of):
    original, copies = build(), []
    run(original, loss_of, 0, BREAK, moment, lambda: copies.append(copied(original)))
    (again,) = copies
    assert again.forecaster is not original.forecaster
    run(original, loss_of, BREAK, TOTAL)
    run(again, loss_of, steps_saved(moment), TOTAL)
    expected = snapshot(run(build(), loss_of, 0, TOTAL))
    assert_same(snapshot(original), expected)
    assert_same(without_statistics(snapshot(again)), without_statistics(expected))
