"""What outlives a fit: checkpoints through the Trainer, copies, a second fit, averaged weights beside the companion."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from tests.helpers import assert_same, linear_growth, mlp, running_average, train
from tests.integrations import EACH_METHOD, differ, wrap
from tests.integrations.lightning_modules import (
    BATCHES,
    QUIET,
    Classifier,
    by_hand,
    fit,
    loader,
    network,
    one_cycle,
    quiet_trainer,
)
from tests.reference import NEAR

pytestmark = QUIET


def still(seed=0):
    """Without dropout: Lightning's checkpoints do not hold the random state."""
    return network(seed=seed, dropout=0.0)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@EACH_METHOD
def test_a_run_resumed_through_the_trainer_is_the_uninterrupted_run(method, tmp_path):
    settings = {"scheduler": one_cycle, "weight": partial(linear_growth, steps=20), "alpha": running_average}
    whole = Classifier(method, still(), **settings)
    expected = fit(whole, max_epochs=4, accumulate_grad_batches=2)

    first_half = Classifier(method, still(), **settings)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    fit(first_half, max_epochs=2, accumulate_grad_batches=2, callbacks=[saving], enable_checkpointing=True)
    assert differ(first_half.net, whole.net)
    resumed = Classifier(method, still(seed=5), **settings)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    trainer = quiet_trainer(max_epochs=4, accumulate_grad_batches=2, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert_same(resumed.net, whole.net)
    assert_same(trainer.optimizers[0].state_dict(), expected.state_dict())


class TakesPlainStates(Classifier):
    """The recipe of docs/frameworks.md."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: optimizer.state_dict() | state)
        return optimizer


@EACH_METHOD
def test_a_wrapped_run_resumes_from_the_checkpoint_of_a_plain_one(method, tmp_path):
    fit(plain := Classifier("plain", still()))
    plain.trainer.save_checkpoint(tmp_path / "plain.ckpt")
    net, data = still(), list(loader()) * 2
    base = by_hand("plain", net, data=data[:BATCHES])
    optimizer = wrap(method, base, net)
    train(net, optimizer, data)

    resumed, trainer = TakesPlainStates(method, still(seed=5)), quiet_trainer(max_epochs=4)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    assert_same(resumed.net, net)
    assert_same(trainer.optimizers[0].state_dict(), optimizer.state_dict())


# ---- averaged weights -----------------------------------------------------------------------------------------------


class Watches(Callback):
    """Keeps weights and learning rates, which are the companion's, and that before SWA's extra epoch."""

    def __init__(self):
        self.before_epochs, self.rates = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, *_):
        assert trainer.optimizers[0].companion_optimizer.param_groups[0]["lr"] == self.rates[-1]

    def on_train_epoch_start(self, trainer, module):
        self.before_epochs.append([p.detach().clone() for p in module.parameters()])

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch < 4:
            self.companion = copy.deepcopy(trainer.optimizers[0].companion)


def with_swa(module, watcher):
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    return fit(module, callbacks=[watcher, swa], max_epochs=4)


def test_stochastic_weight_averaging_gives_the_models_mean_and_its_schedule_drives_both_networks():
    module, watcher = Classifier("dcl", mlp()), Watches()
    optimizer = with_swa(module, watcher)
    assert {*watcher.rates} == {0.05, 0.1}
    averaged = [torch.stack(same).mean(0) for same in zip(*watcher.before_epochs[1:], strict=True)]
    assert_same([*module.parameters()], averaged, **NEAR)
    assert_same(optimizer.companion, watcher.companion)
    assert optimizer.logs()["step"] == 4 * BATCHES


class WithTerm(Classifier):
    """As docs/frameworks.md says, in a function that all steps share."""

    def loss_of(self, batch):
        x, y = batch
        z = self.net(x)
        loss = self.criterion(z, y)
        if self.training:
            loss = loss + self.optimizers().penalty(z)
        return loss

    def training_step(self, batch, index):
        return self.loss_of(batch)

    def test_step(self, batch, index):
        self.log("loss", self.loss_of(batch), batch_size=len(batch[1]))


def test_the_term_of_the_page_survives_swa_with_batch_norm_by_strict_off_and_a_test_of_a_loaded_module():
    watcher = Watches()
    with pytest.raises(RuntimeError, match=r"took part in no backward pass(?s:.*)strict=False allows"):
        with_swa(WithTerm("dcl", network()), Watches())
    module = WithTerm("dcl", network(), strict=False)
    with pytest.warns(UserWarning, match="a step without a penalty"):
        optimizer = with_swa(module, watcher)
    assert_same([*optimizer.companion.parameters()], [*watcher.companion.parameters()])
    assert optimizer.logs()["skipped"] == 1
    loaded = WithTerm("dcl", network(seed=3))
    loaded.load_state_dict(module.state_dict())
    trainer = quiet_trainer(max_epochs=1)
    found = trainer.test(loaded, loader(), verbose=False)[0]["loss"]
    assert found == pytest.approx(trainer.test(module, loader(), verbose=False)[0]["loss"])
