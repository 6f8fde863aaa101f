"""overlap=True and overlap=False, bit for bit: what scripts do, and which forwards are serial."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dcl_optim import DCLOptimizer
from tests.helpers import (
    FEATURES,
    assert_overlap_changes_nothing,
    assert_same,
    batch_norm_net,
    batches,
    dropout_net,
    mlp,
    one,
    sgd,
    snapshot,
    threads_of_forwards,
    train,
    worker_threads,
    wrap,
)

STEPS = 20


def test_two_wrapped_models_with_several_forwards_before_one_backward():
    def script(overlap, watched):
        first, second = mlp(), batch_norm_net(seed=4)
        optimizers = [wrap(model, overlap=overlap, loss_scale=1.0) for model in (first, second)]
        for x, y in batches(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            views = [first(x), second(x), first(-x), second(2 * x)]
            sum(F.cross_entropy(view, y) for view in views).backward()
            F.cross_entropy(second(first(x).repeat(1, 2)[:, :FEATURES]), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return optimizers[watched]

    for watched in (0, 1):
        assert_overlap_changes_nothing(partial(script, watched=watched))


def evaluate_between(step, model, optimizer):
    with torch.no_grad():
        model(one(step)[0])  # recalibrates batch norm
    F.cross_entropy(model(one(step)[0]), one(step)[1])  # no backward comes
    model.eval()
    model(one(step)[0])
    optimizer.companion.eval()(one(step)[0])
    model.train()


def schedule(step, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)


def add_a_group(step, model, optimizer):
    if step == 5:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.03})


def unfreeze(step, model, optimizer):
    model[0].requires_grad_(step >= 5)


def change_dtype(step, model, optimizer):
    if step == 5:
        model.float()


def freeze_a_mode(step, model, optimizer):
    model[1].train(step % 3 < 2)


SCRIPTS = (evaluate_between, schedule, add_a_group, unfreeze, change_dtype, freeze_a_mode)


@pytest.mark.parametrize("meddle", SCRIPTS)
def test_what_scripts_do_between_steps(meddle):
    def script(overlap):
        model = batch_norm_net()
        model[0].requires_grad_(meddle not in (unfreeze, add_a_group))  # the companion shares what is frozen then
        trained = model[1:] if meddle is add_a_group else model
        optimizer = DCLOptimizer(sgd(trained), model, weight=1.0, overlap=overlap)
        for step, (x, y) in enumerate(batches(STEPS)):
            meddle(step, model, optimizer)
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return optimizer

    assert_overlap_changes_nothing(script)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_the_whole_model_checkpointed(reentrant):
    def script(overlap):
        model = mlp()
        optimizer = wrap(model, overlap=overlap)
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            views = [checkpoint(model, view, use_reentrant=reentrant) for view in (x.requires_grad_(), 2 * x)]
            sum(F.cross_entropy(view, y) for view in views).backward()
            optimizer.step()
        return optimizer

    assert_overlap_changes_nothing(script)


# ---- which forwards are serial ---------------------------------------------------------------------------------------


MODES = {
    "a CPU, as it is anyway": (lambda: torch.device("cpu"), True),
    "another device": (lambda: torch.device("meta"), False),
    "a counter": (lambda: FlopCounterMode(display=False), False),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_inside_a_mode_that_belongs_to_the_callers_thread_is_serial(mode):
    enter, concurrent = MODES[mode]
    found = {}
    for overlap in (False, True):
        model = mlp()
        optimizer = wrap(model, overlap=overlap)
        train(model, optimizer, batches(3))
        x, y = one()
        with threads_of_forwards() as names, enter() as inside:
            loss = F.cross_entropy(model(x), y)
        assert ("dcl_optim_0" in names) == (overlap and concurrent)
        loss.backward()
        optimizer.step()
        train(model, optimizer, batches(3, seed=5))
        flops = inside.get_total_flops() if isinstance(inside, FlopCounterMode) else None
        found[overlap] = snapshot(optimizer), flops
    assert_same(found[True], found[False])


def test_a_single_core_has_no_thread(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    model = dropout_net()  # which needs no warning: the companion would run serially anyway
    with wrap(model, overlap=True) as optimizer:
        existing = worker_threads()  # those of earlier tests may still be ending
        train(model, optimizer, batches(4))
        assert set(worker_threads()) <= set(existing)
        found = snapshot(optimizer)
    serial = dropout_net()
    expected = wrap(serial)
    train(serial, expected, batches(4))
    assert_same(found, snapshot(expected))


def test_the_first_forward_is_serial_and_the_others_are_concurrent():
    model, names = mlp(), []
    optimizer = wrap(model, overlap=True)
    optimizer.companion.register_forward_pre_hook(lambda *_: names.append(threading.current_thread().name))
    train(model, optimizer, batches(3))
    assert names == ["MainThread", "dcl_optim_0", "dcl_optim_0"]
