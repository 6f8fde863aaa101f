"""What makes the companion cheaper: learning at every k-th step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import distances, reference
from tests.helpers import MODELS, assert_same, backward, batch_norm_net, batches, mlp, sgd, train, wrap


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
