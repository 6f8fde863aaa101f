"""What makes the companion cheaper: learning at every k-th step, its own dtype, its own device."""

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


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_kth_step_is_the_reference_with_a_chase_at_every_kth_step(name, every):
    model, hand = MODELS[name](), MODELS[name]()
    companion = copy.deepcopy(hand)
    optimizer = wrap(model, companion_every=every)
    base, chaser = sgd(hand), sgd(companion)
    torch.manual_seed(3)
    train(model, optimizer, batches(20))
    torch.manual_seed(3)
    for step, (x, y) in enumerate(batches(20), start=1):
        learns = step % every == 0
        reference.dcl_step(hand, companion, base, chaser, x, y, F.cross_entropy, distances.mse, learns=learns)
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


def test_a_companion_of_another_dtype_gets_integers_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 8), nn.Flatten(), nn.Linear(16, CLASSES))
    optimizer = wrap(model, companion_dtype=torch.bfloat16)
    tokens = torch.tensor([[0, 257], [299, 2]])  # 257 and 299 are no bfloat16
    seen = []
    optimizer.companion.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    backward(model, tokens, torch.tensor([0, 1]))
    assert_same(seen, [tokens])
    assert optimizer.penalty < 1e-3  # the copy's, but for rounding


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


@pytest.mark.parametrize("name", ["mlp", "batch_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_companion_of_its_own_dtype_is_the_loop_written_by_hand(name, dtype):
    model, hand = MODELS[name](), MODELS[name]()
    companion = copy.deepcopy(hand).to(dtype)
    optimizer = wrap(model, companion_dtype=dtype)
    base, chaser = sgd(hand), sgd(companion)
    train(model, optimizer, batches(20))
    for x, y in batches(20):
        z, c = hand(x), companion(x.to(dtype))
        base.zero_grad()
        (F.cross_entropy(z, y) + F.mse_loss(z, c.detach().double())).backward()
        base.step()
        chaser.zero_grad()
        wide = c.detach().float()
        target = torch.lerp(z.detach(), c.detach().double(), 0.6).float()
        c.backward((2 / c.numel() * (wide - target)).to(dtype))
        chaser.step()
    assert next(optimizer.companion.parameters()).dtype == dtype
    assert_same(model, hand, rtol=1e-3, atol=1e-4)
    ours, by_hand, start = (flat(module) for module in (optimizer.companion, companion, MODELS[name]()))
    assert (ours - by_hand).norm() < 0.1 * (by_hand - start).norm()


def test_a_companion_of_its_own_dtype_shares_nothing_and_leaves_the_model_alone():
    model = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = wrap(model, companion_dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert {parameter.dtype for parameter in optimizer.companion.parameters()} == {torch.float32}
    train(model, optimizer, batches(2))
    saved = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["model"]
    assert set(saved) == set(model.state_dict())


def test_a_companion_keeps_its_own_dtype_when_the_model_changes_its():
    model = mlp()
    optimizer = wrap(model, companion_dtype=torch.bfloat16)
    train(model, optimizer, batches(1))
    model.float()
    train(model, optimizer, batches(1, dtype=torch.float32))
    assert {parameter.dtype for parameter in optimizer.companion.parameters()} == {torch.bfloat16}


def test_a_companion_on_the_device_of_the_model_is_the_same_training():
    results = []
    for options in ({}, {"companion_device": "cpu"}):
        model = MODELS["dropout"]()
        optimizer = wrap(model, **options)
        torch.manual_seed(2)
        train(model, optimizer, batches(5))
        results.append((model, optimizer.companion))
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


@pytest.mark.gpu
def test_a_companion_on_a_gpu_beside_a_model_on_the_cpu():
    model, hand = mlp(), mlp()
    optimizer, other = wrap(model, companion_device="cuda"), wrap(hand)
    train(model, optimizer, batches(10))
    train(hand, other, batches(10))
    assert next(optimizer.companion.parameters()).is_cuda
    assert_same(model, hand, rtol=1e-9, atol=1e-12)
    assert_same(optimizer.companion.cpu(), other.companion, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu(2)
def test_a_companion_on_a_second_gpu_replays_the_draws_of_the_first():
    results = []
    for options in ({}, {"companion_device": "cuda:1"}):
        model = MODELS["dropout"]().to("cuda:0")
        optimizer = wrap(model, **options)
        torch.manual_seed(2)
        train(model, optimizer, [(x.cuda(), y.cuda()) for x, y in batches(10)])
        results.append((model, optimizer.companion.to("cuda:0")))
    assert_same(results[0][0], results[1][0], rtol=1e-9, atol=1e-12)
    assert_same(results[0][1], results[1][1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"companion_every": 0}, ValueError, r"companion_every=0 must be at least 1"),
        ({"companion_every": 1.5}, TypeError, r"companion_every=1.5 must be an integer, got float"),
        ({"companion_every": True}, TypeError, r"companion_every=True must be an integer"),
        (
            {"companion_dtype": torch.int8},
            TypeError,
            r"companion_dtype=torch.int8 must be a floating-point torch.dtype",
        ),
        ({"companion_dtype": "bfloat16"}, TypeError, r"companion_dtype='bfloat16' must be a floating-point"),
        ({"companion_device": "gpu7"}, ValueError, r"companion_device='gpu7' is no device here"),
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
