"""Copies, pickles and checkpoints of a moment between two steps, at which the companion's backward may be to come."""

import copy
import io

import pytest
import torch

from tests.helpers import assert_same, batch_norm_net, batches, one, snapshot, through_pickle, wrap
from tests.reference import loss_of

TOTAL, BREAK = 8, 4
MOMENTS = ["after a step", "after a forward", "within an accumulation"]
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def build():
    model = batch_norm_net()
    return wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def run(optimizer, way, first, last, moment=None, save=None):
    """Train on three micro-batches a step; at a moment of the last step, save something."""
    for step, (x, y) in enumerate(batches(TOTAL)):
        if first <= step < last:
            torch.manual_seed(step)
            optimizer.zero_grad()
            for part, (rows, labels) in enumerate(zip(x.tensor_split(3), y.tensor_split(3), strict=True)):
                loss = loss_of(optimizer, rows, labels, way) / 3
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
    file, half = io.BytesIO(), build()

    def save():
        torch.save({"model": half.model.state_dict(), "optimizer": half.state_dict()}, file)

    run(half, "line", 0, BREAK, moment, save)
    file.seek(0)
    state, again = torch.load(file, weights_only=True), build()
    run(again, "line", 0, 1)  # on its way elsewhere
    loss_of(again, *one(), "line").backward()
    again.model.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    run(again, "line", steps_saved(moment), TOTAL)
    expected = snapshot(run(build(), "line", 0, TOTAL))
    assert_same(without_statistics(snapshot(again)), without_statistics(expected))
    if moment == "after a step":
        assert_same(snapshot(again), expected)


def without_statistics(found):
    if not isinstance(found, dict):
        return found
    return {key: without_statistics(value) for key, value in found.items() if key not in STATISTICS}


@pytest.mark.parametrize(
    ("moment", "copied", "way"),
    [
        ("after a step", copy.deepcopy, "term"),
        ("after a forward", copy.deepcopy, "line"),
        ("after a forward", copy.deepcopy, "term"),
        ("within an accumulation", copy.deepcopy, "term"),
        ("within an accumulation", through_pickle, "line"),
    ],
)
def test_a_copy_and_its_original_both_go_on(moment, copied, way):
    original, copies = build(), []
    run(original, way, 0, BREAK, moment, lambda: copies.append(copied(original)))
    (again,) = copies
    assert again.forecaster is not original.forecaster
    run(original, way, BREAK, TOTAL)
    run(again, way, steps_saved(moment), TOTAL)
    expected = snapshot(run(build(), way, 0, TOTAL))
    assert_same(snapshot(original), expected)
    assert_same(without_statistics(snapshot(again)), without_statistics(expected))
