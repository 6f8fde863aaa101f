"""overlap=True and overlap=False, bit for bit with one intra-op thread: loops, precisions, options."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_overlap_changes_nothing,
    batch_norm_net,
    batches,
    intra_op_threads,
    mlp,
    train,
    wrap,
)

STEPS = 20
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


# ---- loops ----------------------------------------------------------------------------------------------------------


def accumulate(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        for part, labels in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            (F.cross_entropy(model(part), labels) / 3).backward()
        optimizer.step()


def with_closure(model, optimizer, data, goes_backward=True):
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if goes_backward:
                loss.backward()
            return loss

        optimizer.step(closure)


LOOPS = {
    "plain": (train, SGD),
    "accumulation": (accumulate, ADAMW),
    "closure": (with_closure, ADAMW),
    "closure without backward": (partial(with_closure, goes_backward=False), SGD),
    "several evaluations": (with_closure, partial(torch.optim.LBFGS, lr=0.1, max_iter=3)),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop(loop):
    def script(overlap):
        model, (run, base) = batch_norm_net(), LOOPS[loop]
        options = {"weight": 0.7, "alpha": 0.4, "companion_optimizer": SGD if loop == "several evaluations" else None}
        optimizer = DCLOptimizer(base(model.parameters()), model, overlap=overlap, **options)
        run(model, optimizer, batches(STEPS))
        return optimizer

    assert_overlap_changes_nothing(script)


def test_several_threads_change_the_rounding_only():
    def script(overlap):
        model = batch_norm_net()
        optimizer = wrap(model, overlap=overlap)
        train(model, optimizer, batches(6, size=64))
        return optimizer

    with intra_op_threads(2):
        assert_overlap_changes_nothing(script, rtol=1e-9, atol=1e-12)


# ---- precisions -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, which autocast converts once for both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


def two_views(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        losses = [F.cross_entropy(model(view), y) for view in (x, -x)]
    sum(losses).backward()


def backward_inside(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        for view in (x, -x):
            F.cross_entropy(model(view), y).backward()


def backward_between_forwards(model, optimizer, x, y):
    """The second and the third forward share the weights that the second converted."""
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (F.cross_entropy(model(view), y) for view in (x, -x))
        first.backward()
        third = F.cross_entropy(model(2 * x), y)
    (second + third).backward()


@pytest.mark.parametrize("micro_batches", [two_views, backward_inside, backward_between_forwards])
def test_autocast_whose_cache_all_threads_share(micro_batches):
    def script(overlap):
        model = Tied()
        optimizer = wrap(model, overlap=overlap)
        for x, y in batches(STEPS, dtype=torch.float32):
            optimizer.zero_grad()
            micro_batches(model, optimizer, x, y)
            optimizer.step()
        return optimizer

    assert_overlap_changes_nothing(script)


def test_float16_with_a_scaler_that_skips_a_step():
    scales, parts = {}, 3

    def script(overlap):
        model, scaler = batch_norm_net().float(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = wrap(model, overlap=overlap)
        for step, (x, y) in enumerate(batches(STEPS, dtype=torch.float32)):
            optimizer.zero_grad()
            for rows, labels in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(rows), labels) / parts
                scaler.scale(loss * float("inf") if step == 9 else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
        scales[overlap] = scaler.get_scale()
        return optimizer

    assert_overlap_changes_nothing(script)
    assert set(scales.values()) == {2.0**9}, "the scaler has to have skipped"


# ---- options --------------------------------------------------------------------------------------------------------


def other_architecture():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, CLASSES)).double()


OPTIONS = {
    "fraction, kl": {"companion_fraction": 0.25, "distance": "kl"},
    "every, lr scale": {"companion_every": 3, "companion_lr_scale": 0.3},
    "dtype": {"companion_dtype": torch.float32},
    "companion, optimizer": {
        "companion": other_architecture,
        "companion_optimizer": partial(torch.optim.Adam, lr=1e-3),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option):
    def script(overlap):
        model = mlp()
        optimizer = wrap(model, overlap=overlap, **OPTIONS[option])
        accumulate(model, optimizer, batches(STEPS))
        return optimizer

    assert_overlap_changes_nothing(script)


def test_a_criterion_that_tells_the_factor():
    def script(overlap):
        model, criterion = mlp(), nn.MultiMarginLoss()
        optimizer = wrap(model, overlap=overlap, criterion=criterion)
        train(model, optimizer, batches(STEPS), loss=lambda z, y: 8 * criterion(z, y))
        return optimizer

    assert_overlap_changes_nothing(script)
