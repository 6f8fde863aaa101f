"""What makes the companion cheaper: learning at every k-th step, or from a part of the batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import distances, reference
from tests.helpers import (
    CLASSES,
    FEATURES,
    MODELS,
    assert_same,
    backward,
    batch_norm_net,
    batches,
    mlp,
    sgd,
    train,
    wrap,
)


@pytest.mark.parametrize(("name", "every"), [("mlp", 2), ("batch_norm", 3), ("dropout", 2)])
def test_every_kth_step_is_the_reference_that_learns_at_every_kth_step(name, every):
    model, hand = MODELS[name](), MODELS[name]()
    companion = copy.deepcopy(hand)
    optimizer = wrap(model, companion_every=every)
    base, second = sgd(hand), sgd(companion)
    torch.manual_seed(3)
    train(model, optimizer, batches(20))
    torch.manual_seed(3)
    for step, (x, y) in enumerate(batches(20), start=1):
        learns = step % every == 0
        reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, distances.mse, learns=learns)
    assert_same(model, hand, rtol=1e-10, atol=1e-12)
    assert_same(optimizer.companion, companion, rtol=1e-10, atol=1e-12)


def test_a_step_in_which_the_companion_does_not_learn_keeps_no_graph_of_it():
    model = batch_norm_net()
    optimizer = wrap(model, companion_every=2)
    grad_modes = []
    optimizer.companion.register_forward_hook(lambda *_: grad_modes.append(torch.is_grad_enabled()))
    train(model, optimizer, batches(4))
    assert grad_modes == [False, True, False, True]


@pytest.mark.parametrize(("fraction", "rows"), [(0.29, [5, 11]), (0.28, [4, 12]), (0.01, [2, 14]), (1.0, [16])])
def test_the_rows_that_the_companion_learns_from_are_the_nearest_number(fraction, rows):
    model = mlp()
    optimizer = wrap(model, companion_fraction=fraction)
    seen = []
    optimizer.companion.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    train(model, optimizer, batches(1))
    assert seen[: len(rows)] == rows  # and then a check, at the first forecast


def test_a_skipped_step_does_not_count():
    model = mlp()
    optimizer = wrap(model, companion_every=2)
    for _ in range(3):
        (batch,) = batches(1)
        backward(model, *batch)  # and no step, as when a gradient scaler finds an infinity
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.companion)
    train(model, optimizer, batches(1))
    assert_same(optimizer.companion, before)
    train(model, optimizer, batches(1))
    with pytest.raises(AssertionError):
        assert_same(optimizer.companion, before)


def test_all_forwards_of_a_step_are_learned_from_or_none():
    whole, parts = mlp(), mlp()
    in_one, in_two = wrap(whole, companion_every=2), wrap(parts, companion_every=2)
    for x, y in batches(4):
        train(whole, in_one, [(x, y)])
        in_two.zero_grad()
        for rows in (slice(0, 8), slice(8, 16)):
            (F.cross_entropy(parts(x[rows]), y[rows]) / 2).backward()
        in_two.step()
    assert_same(whole, parts, rtol=1e-10, atol=1e-12)
    assert_same(in_one.companion, in_two.companion, rtol=1e-10, atol=1e-12)


def test_resuming_keeps_the_count_of_steps():
    data = list(batches(7))
    model = mlp()
    optimizer = wrap(model, companion_every=3)
    train(model, optimizer, data[:4])
    again = mlp(seed=9)
    other = wrap(again, companion_every=3)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[4:])
    train(again, other, data[4:])
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"companion_every": 0}, ValueError, r"companion_every=0 must be at least 1"),
        ({"companion_every": 1.5}, TypeError, r"companion_every=1.5 must be an integer, got float"),
        ({"companion_every": True}, TypeError, r"companion_every=True must be an integer"),
    ],
)
def test_bad_values(options, error, message):
    with pytest.raises(error, match=message):
        wrap(mlp(), **options)


# ---- a part of the batch: which dimension is the batch? --------------------------------------------------------------


class Recurrent(nn.Module):
    """Takes (time, batch, features); gives logits for each moment, or batch first for the last one."""

    def __init__(self, last: bool, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.dropout = nn.RNN(FEATURES, 12), nn.Dropout(dropout)
        self.head, self.last = nn.Linear(12, CLASSES), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.head(self.dropout(self.rnn(x)[0]))
        return z[-1] if self.last else z


@pytest.mark.parametrize("samples", [8, 12], ids=["as many samples as moments", "more samples"])
@pytest.mark.parametrize(("last", "dropout"), [(False, 0.0), (False, 0.3), (True, 0.0)])
def test_a_part_of_a_batch_that_has_the_time_first_is_refused(last, dropout, samples):
    model = Recurrent(last, dropout)
    before = copy.deepcopy(model)
    optimizer = wrap(model, companion_fraction=0.5, class_dim=-1)
    with pytest.raises(ValueError, match="pass companion_fraction=1"):
        model(torch.randn(8, samples, FEATURES))
    assert_same(model, before)
    assert_same(optimizer.companion, before)


def test_a_part_of_the_batch_with_inputs_of_other_lengths_first():
    """Neither the table nor the scale, which come first, is as long as the batch, whose size changes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, table, scale, x):
            return self.net(x) * scale * table.sum()

    model, plain = Scaled(), mlp()
    rows = []
    optimizer, expected = wrap(model, companion_fraction=0.25), wrap(plain, companion_fraction=0.25)
    optimizer.companion.net.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    table, scale = torch.full((4,), 0.25, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    data = [*batches(2), *batches(2, size=12)]
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(table, scale, x), y).backward()
        optimizer.step()
    train(plain, expected, data)
    assert_same(model.net, plain)
    assert_same(optimizer.companion.net, expected.companion)
    assert rows == [4, 12, 16, 4, 12, 4, 12, 3, 9, 3, 9], "after the first forecast comes the check"


def test_the_check_of_a_part_leaves_no_trace():
    model = batch_norm_net()
    model[1].eval()
    optimizer = wrap(model, companion_fraction=0.5)
    calls = []
    optimizer.companion.register_forward_hook(lambda module, *_: calls.append([m.training for m in module.modules()]))
    train(model, optimizer, batches(1))
    modes = [True, True, False, True, True]
    assert calls == [modes] * 2 + [[False] * 5] * 3
    train(model, optimizer, batches(1))
    assert calls[5:] == [modes] * 2
