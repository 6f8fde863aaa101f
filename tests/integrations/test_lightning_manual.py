"""Lightning's manual optimization: ``self.optimizers()`` and ``manual_backward``."""

import pytest
import torch
from torch import nn

from tests.helpers import assert_same, assert_same_networks
from tests.integrations import EACH_METHOD, wrap
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


@EACH_METHOD
@pytest.mark.parametrize("written", [Manual, WithClosure, Accumulates])
def test_manual_optimization_is_the_hand_written_loop(method, written):
    hand = {"accumulate": 3} if written is Accumulates else {}
    module, net = written(method, network()), network()
    ours, theirs = fit(module), by_hand(method, net, **hand)
    assert_same(module.net, net)
    assert_same(ours.state_dict(), theirs.state_dict())


# ---- what a module calls on self.optimizers() reaches the optimizer -------------------------------------------------
# Lightning's shell makes itself a subclass of the optimizer's class: our methods then run with the shell as `self`.


@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
def test_a_step_that_the_module_skips_is_forgotten_by_zero_grad_through_lightnings_shell(when):
    class Skips(Manual):
        def training_step(self, batch, batch_idx):
            x, y = batch
            optimizer = self.optimizers()
            if when == "before the forward":
                optimizer.zero_grad()
            loss = self.criterion(self.net(x), y)
            if when == "after the forward":
                optimizer.zero_grad()
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
    assert_same_networks(ours, theirs)
