"""Accelerate's awkward places: short accumulations, an epoch cut in two, several processes, Schedule-Free."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from tests.helpers import assert_same, batches, cells, dropout_net, mlp, on_two_ranks
from tests.integrations.conftest import forget

METHODS = ("dcl", "dcp")
SIZE, BATCHES, PARTS = 8, 7, 2  # an epoch's last accumulation has one batch


@contextmanager
def accelerator(**options):
    """Accelerate keeps its settings in singletons."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    try:
        yield Accelerator(cpu=True, dataloader_config=order, **options)
    finally:
        forget()


def wrap(method, model, weight=5.0):
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if method == "plain":
        return base
    if method == "dcl":
        return DCLOptimizer(base, model, weight=weight)
    return DCPOptimizer(base, model, weight=weight, alpha=0.6)


def dataset():
    return TensorDataset(*(torch.cat(parts) for parts in zip(*batches(BATCHES, SIZE), strict=True)))


def differ(first, second):
    return any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


class Script:
    """Training as Accelerate's examples write it, which can be cut after any batch."""

    def __init__(self, accelerator, method, build=mlp, shuffle=False, size=SIZE, weight=5.0):
        self.accelerator, self.criterion = accelerator, nn.CrossEntropyLoss()
        model = build()
        optimizer = wrap(method, model, weight)
        # Accelerate steps a schedule once for each process.
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20 * accelerator.num_processes)
        # A generator of its own: the loader's seed would be drawn from dropout's stream, anew when a run goes on.
        loader = DataLoader(dataset(), size, shuffle=shuffle, generator=torch.Generator())
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def epoch(self, number, first=0, last=None):
        self.loader.set_epoch(number)
        loader = skip_first_batches(self.loader, first) if first else self.loader
        for index, (x, y) in enumerate(loader, start=first):
            if index == last:
                break
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.criterion(self.model(x), y))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("method", METHODS)
def test_the_short_accumulation_at_an_epochs_end_is_a_step_of_its_own(method):
    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        script = Script(shared, method).epoch(0).epoch(1)
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = wrap(method, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(2):
        for index, (x, y) in enumerate(batches(BATCHES, SIZE), start=1):
            if method == "dcp":  # given, which Accelerate's loop has read
                optimizer.set_targets(y)
            (criterion(model(x), y) / PARTS).backward()
            if index % PARTS == 0 or index == BATCHES:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    assert_same(script.model, model)
    assert_same(script.optimizer.optimizer.state_dict(), optimizer.state_dict())
    assert optimizer.logs()["step"] == 8


def test_accumulation_is_the_bare_algorithm():
    """No hook in the second run: both batches' penalties at half, and a companion that learns from their mean."""
    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        script = Script(shared, "dcl").epoch(0)
    model, criterion = mlp(), nn.CrossEntropyLoss()
    companion = copy.deepcopy(model)
    bases = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, companion)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(base, 20) for base in bases]
    data = list(batches(BATCHES, SIZE))
    for start in range(0, BATCHES, PARTS):
        group = data[start : start + PARTS]
        for x, y in group:
            z, c = model(x), companion(x)
            ((criterion(z, y) + 5.0 * mse(z, c.detach())) / PARTS).backward()
            (mse(c, (0.6 * c + 0.4 * z).detach()) / len(group)).backward()
        for each in (*bases, *schedulers):
            each.step()
        for base in bases:
            base.zero_grad()
    assert_same(script.model, model, rtol=1e-8, atol=1e-10)
    assert_same(script.optimizer.optimizer.companion, companion, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_that_is_cut_in_two_by_save_state_goes_on_to_the_last_bit(method, tmp_path):
    """Shuffled, with dropout, a schedule and accumulation; the second half in what could be another process."""

    def started():
        set_seed(3)
        return Script(shared, method, dropout_net, shuffle=True)

    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        whole = started().epoch(0).epoch(1)
    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        half = started().epoch(0, last=4)
        shared.save_state(tmp_path)
    assert differ(whole.model, half.model)
    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        resumed = started()
        torch.manual_seed(99)
        shared.load_state(tmp_path)
        resumed.epoch(0, first=4).epoch(1)
    assert_same(resumed.model, whole.model)
    assert_same(resumed.optimizer.optimizer.state_dict(), whole.optimizer.optimizer.state_dict())
    assert_same(resumed.scheduler.state_dict(), whole.scheduler.state_dict())


def test_schedule_free_is_switched_through_accelerates_optimizer():
    """Its `train` and `eval` reach the model's weights and the companion's."""
    states = []
    for with_accelerate in (True, False):
        model = mlp()
        optimizer = DCLOptimizer(AdamWScheduleFree(model.parameters(), lr=1e-2), model, weight=5.0)
        ours = optimizer
        with accelerator() as shared:
            if with_accelerate:
                model, optimizer = shared.prepare(model, optimizer)
            optimizer.train()
            for x, y in batches(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            training = copy.deepcopy(ours.companion)
            optimizer.eval()
        assert differ(training, ours.companion)
        states.append((model.state_dict(), ours.state_dict()))
    assert_same(*states)


def learned_by(method, script):
    ours = script.optimizer.optimizer
    return dict(ours.companion.state_dict()) if method == "dcl" else {"prototypes": ours.prototypes}


def _train_on_a_rank(rank, folder, method):
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, environment | {"OMP_NUM_THREADS": "1"}), accelerator() as shared:
        assert shared.num_processes == 2
        script = Script(shared, method, size=SIZE // 2).epoch(0)
        assert isinstance(script.model, nn.parallel.DistributedDataParallel)
        state = {"model": shared.unwrap_model(script.model).state_dict(), "ours": learned_by(method, script)}
    torch.save(state, folder / f"{rank}.pt")


@pytest.mark.parametrize("method", cells(METHODS, "dcl"))
def test_two_processes_are_one_with_the_joint_batch(method, tmp_path):
    """Accelerate deals the batches out in turn; the wrapper is made before DistributedDataParallel is."""
    on_two_ranks(_train_on_a_rank, tmp_path, method)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    with accelerator() as shared:
        script = Script(shared, method).epoch(0)
    assert_same(first["model"], script.model.state_dict(), rtol=1e-8, atol=1e-10)
    assert_same(first["ours"], learned_by(method, script), rtol=1e-8, atol=1e-10)
    assert differ(script.model, mlp())


@pytest.mark.parametrize("method", METHODS)
def test_weight_zero_is_accelerates_plain_run(method):
    models = []
    for kind in (method, "plain"):
        with accelerator(gradient_accumulation_steps=PARTS) as shared:
            script = Script(shared, kind, dropout_net, weight=0.0)
            torch.manual_seed(5)
            models.append(script.epoch(0).model)
    assert_same(*models)
