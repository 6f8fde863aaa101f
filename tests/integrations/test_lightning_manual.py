"""Lightning's manual optimization: ``self.optimizers()``, ``manual_backward``, ``toggle_model``, several optimizers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import FEATURES, assert_same
from tests.integrations import METHODS, differ, wrap
from tests.integrations.lightning_modules import QUIET, Classifier, by_hand, fit, loader, network

pytestmark = QUIET


class Manual(Classifier):
    """Manual optimization as Lightning's documentation has it."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.criterion(self.net(x), y))
        optimizer.step()


class WithClosure(Manual):
    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            loss = self.criterion(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class Accumulates(Manual):
    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(self.criterion(self.net(x), y) / 3)
        if (batch_idx + 1) % 3 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("written", [Manual, WithClosure, Accumulates])
def test_manual_optimization_is_the_hand_written_loop(method, written):
    hand = {"accumulate": 3} if written is Accumulates else {}
    module, net = written(method, network()), network()
    ours, theirs = fit(module), by_hand(method, net, **hand)
    assert_same(module.net, net)
    assert_same(ours.state_dict(), theirs.state_dict())


# ---- what a module calls on self.optimizers() reaches the optimizer -------------------------------------------------
# Lightning's shell makes itself a subclass of the optimizer's class: our methods then run with the shell as `self`.


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
def test_a_step_that_the_module_skips_is_forgotten_by_zero_grad_through_lightnings_shell(to_none, when):
    class Skips(Manual):
        def training_step(self, batch, batch_idx):
            x, y = batch
            optimizer = self.optimizers()
            if when == "before the forward":
                optimizer.zero_grad(set_to_none=to_none)
            loss = self.criterion(self.net(x), y)
            if when == "after the forward":
                optimizer.zero_grad(set_to_none=to_none)
            self.manual_backward(loss)
            if batch_idx % 3 != 1:
                optimizer.step()

    module, net = Skips("dcl", network(dropout=0.0)), network(dropout=0.0)
    ours = fit(module, max_epochs=1)
    theirs = wrap("dcl", torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), net)
    for index, (x, y) in enumerate(loader()):
        loss = nn.functional.cross_entropy(net(x), y)  # batch norm sees the skipped batches, the optimizers do not
        if index % 3 != 1:
            theirs.zero_grad()
            loss.backward()
            theirs.step()
    assert_same(module.net, net)
    assert_same(ours.companion, theirs.companion)


# ---- two networks, two wrapped optimizers ----------------------------------------------------------------------------


def generator() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, FEATURES)).double()


def discriminator() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def wrapped_pair(*networks: nn.Module) -> list[Any]:
    return [DCLOptimizer(torch.optim.Adam(net.parameters(), lr=0.01), net, weight=1.0) for net in networks]


criterion = nn.BCEWithLogitsLoss()


def generators_loss(g: nn.Module, d: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    made = g(x[:, :3])
    return criterion(d(made), x.new_ones(len(x), 1)) + optimizer.penalty(made)


def discriminators_loss(g: nn.Module, d: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    made = g(x[:, :3]).detach()
    real, false = d(x), d(made)
    loss = criterion(real, x.new_ones(len(x), 1)) + criterion(false, x.new_zeros(len(x), 1))
    return loss + optimizer.penalty(real) + optimizer.penalty(false)


class Adversaries(pl.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        for optimizer, loss_of in zip(self.optimizers(), (generators_loss, discriminators_loss), strict=True):
            with optimizer.toggle_model():
                loss = loss_of(self.generator, self.discriminator, optimizer, x)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self):
        return wrapped_pair(self.generator, self.discriminator)


def test_two_wrapped_optimizers_with_toggle_model_are_the_hand_written_game():
    module, g, d = Adversaries(), generator(), discriminator()
    fit(module)
    first, second = wrapped_pair(g, d)
    torch.manual_seed(3)
    for x, _ in [*loader()] * 2:  # each network is frozen in the other's turn
        for optimizer, loss_of, frozen in ((first, generators_loss, d), (second, discriminators_loss, g)):
            frozen.requires_grad_(False)
            optimizer.zero_grad()
            loss_of(g, d, optimizer, x).backward()
            optimizer.step()
            frozen.requires_grad_(True)
    assert_same(module.generator, g)
    assert_same(module.discriminator, d)
    for ours, theirs in zip(module.trainer.optimizers, (first, second), strict=True):
        assert_same(ours.state_dict(), theirs.state_dict())
        assert differ(ours.companion, ours.model)
