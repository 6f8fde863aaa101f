"""Lightning's manual optimisation: ``self.optimizers()``, ``manual_backward``, ``toggle_model``, several optimizers."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same
from tests.integrations.lightning_modules import QUIET, Classifier, by_hand, differ, fit, loader, network

pytestmark = QUIET
METHODS = ("dcl", "dcp")


class Manual(Classifier):
    """Manual optimisation as Lightning's documentation has it."""

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
def test_manual_optimisation_is_the_hand_written_loop(method, written):
    hand = {"accumulate": 3} if written is Accumulates else {}
    module, net, plain = written(method, network()), network(), network()
    ours, theirs = fit(module), by_hand(method, net, **hand)
    assert_same(module.net, net)
    assert_same(ours.state_dict(), theirs.state_dict())
    by_hand("plain", plain, **hand)
    assert differ(net, plain)


# ---- what a module calls on self.optimizers() reaches the optimizer -------------------------------------------------
# Lightning's shell makes itself a subclass of the optimizer's class: our methods then run with the shell as `self`.


def test_labels_that_are_set_through_lightnings_shell_are_found():
    class SetsTargets(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().set_targets(batch[1])
            super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            base = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            return DCPOptimizer(base, self.net, CLASSES, weight=1.0, alpha=0.6)

    module, net = SetsTargets("dcp", network()), network()
    ours, theirs = fit(module), by_hand("dcp", net)
    assert_same(module.net, net)
    assert_same(ours.state_dict(), theirs.state_dict())


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

    module, net = Skips("dcl", network(dropout=0.0), loss_scale=1.0), network(dropout=0.0)
    ours = fit(module, max_epochs=1)
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    theirs = DCLOptimizer(base, net, loss_scale=1.0, weight=1.0)
    for index, (x, y) in enumerate(loader()):
        loss = nn.functional.cross_entropy(net(x), y)  # batch norm sees the skipped batches, the optimizers do not
        if index % 3 != 1:
            theirs.zero_grad()
            loss.backward()
            theirs.step()
    assert_same(module.net, net)
    assert_same(ours.companion, theirs.companion)


def test_detach_through_lightnings_shell_leaves_the_base_optimizer_alone():
    class Detaches(Manual):
        def on_train_start(self):
            self.optimizers().detach()

    module, plain = Detaches("dcl", network()), network()
    fit(module)
    by_hand("plain", plain)
    assert_same(module.net, plain)
    assert not module.net._forward_hooks


@pytest.mark.parametrize("method", METHODS)
def test_a_state_saved_and_loaded_through_lightnings_shell_is_the_optimizers_own(method):
    saved = []

    class Saves(Manual):
        def on_train_end(self):
            saved.append(copy.deepcopy(self.optimizers().state_dict()))

    class Loads(Manual):
        def on_train_start(self):
            self.optimizers().load_state_dict(copy.deepcopy(saved[0]))  # torch trains on in the tensors it was given
            saved.append(copy.deepcopy(self.trainer.optimizers[0].state_dict()))

    optimizer = fit(Saves(method, network()))
    assert_same(saved[0], optimizer.state_dict())
    resumed = fit(Loads(method, network(seed=5)), max_epochs=1)
    assert_same(saved[1], saved[0])
    assert resumed.logs()["step"] == 14 + 7


# ---- two networks, two wrapped optimizers ----------------------------------------------------------------------------


def generator() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, FEATURES)).double()


def discriminator() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def wrapped_pair(generator, discriminator):
    """Both optimizers of a GAN, whose losses do not tell their factor."""
    bases = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, discriminator)]
    return [
        DCLOptimizer(bases[0], generator, loss_scale=1.0, weight=1.0),
        DCLOptimizer(bases[1], discriminator, loss_scale=1.0, weight=1.0),
    ]


class Adversaries(pl.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()
        self.criterion = nn.BCEWithLogitsLoss()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.optimizers()
        ones, zeros = x.new_ones(len(x), 1), x.new_zeros(len(x), 1)
        with first.toggle_model():
            loss = self.criterion(self.discriminator(self.generator(x[:, :3])), ones)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
        with second.toggle_model():
            made = self.generator(x[:, :3]).detach()
            real = self.criterion(self.discriminator(x), ones)
            loss = real + self.criterion(self.discriminator(made), zeros)
            second.zero_grad()
            self.manual_backward(loss)
            second.step()

    def configure_optimizers(self):
        return wrapped_pair(self.generator, self.discriminator)


def play_by_hand(g, d, epochs=2):
    """The same game without Lightning, each network frozen in the other's turn."""
    criterion = nn.BCEWithLogitsLoss()
    first, second = wrapped_pair(g, d)
    torch.manual_seed(3)
    for x, _ in [*loader()] * epochs:
        ones, zeros = x.new_ones(len(x), 1), x.new_zeros(len(x), 1)
        d.requires_grad_(False)
        first.zero_grad()
        criterion(d(g(x[:, :3])), ones).backward()
        first.step()
        d.requires_grad_(True)
        g.requires_grad_(False)
        second.zero_grad()
        made = g(x[:, :3])
        (criterion(d(x), ones) + criterion(d(made), zeros)).backward()
        second.step()
        g.requires_grad_(True)
    return first, second


def test_two_wrapped_optimizers_with_toggle_model_are_the_hand_written_game():
    module, g, d = Adversaries(), generator(), discriminator()
    trainer_first = fit(module)
    theirs = play_by_hand(g, d)
    assert_same(module.generator, g)
    assert_same(module.discriminator, d)
    ours = module.trainer.optimizers
    assert ours[0] is trainer_first
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one.state_dict(), other.state_dict())
    assert ours[1].logs()["loss_scale"] == 1.0
    assert all(differ(optimizer.companion, optimizer.model) for optimizer in ours)


def test_a_toggled_off_discriminator_adds_nothing_to_the_generators_gradient():
    gradients = []

    class GeneratorsTurn(Adversaries):
        def training_step(self, batch, batch_idx):
            x, _ = batch
            with self.optimizers()[0].toggle_model():
                judged = self.discriminator(self.generator(x[:, :3]))
                self.manual_backward(self.criterion(judged, torch.ones_like(judged)))
                gradients.append([parameter.grad.clone() for parameter in self.generator.parameters()])

        def configure_optimizers(self):
            first, second = super().configure_optimizers()
            first.detach()
            for parameter in second.companion.parameters():
                parameter.data += 1.0  # it disagrees with the discriminator from the first batch
            if self.plain:
                second.detach()
            return first, second

    for plain in (False, True):
        module = GeneratorsTurn()
        module.plain = plain
        fit(module, limit_train_batches=1, max_epochs=1)
    assert_same(*gradients)
