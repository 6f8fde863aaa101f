"""Lightning's automatic optimisation: one line of configure_optimizers is ours, the rest is the user's."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dcl_optim import DCLOptimizer, LinearWarmup, RunningAverage
from dcl_optim.distances import mse
from dcl_optim.reference import dcl_step
from tests.helpers import assert_same
from tests.integrations.lightning_modules import (
    BATCHES,
    QUIET,
    Classifier,
    Validated,
    by_hand,
    differ,
    fit,
    loader,
    network,
    quiet_trainer,
)

pytestmark = QUIET
METHODS = ("dcl", "dcp")


def assert_trained_alike(method: str, lightning: dict, hand: dict, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Weights, statistics, momentum, companion or prototypes and their optimizer: bit for bit."""
    module, net = Classifier(method, network(dtype), **lightning.pop("module", {})), network(dtype)
    ours = fit(module, loader(dtype), **lightning)
    theirs = by_hand(method, net, data=loader(dtype), **hand)
    assert_same(module.net, net)
    assert_same(ours.state_dict(), theirs.state_dict())
    return net


# ---- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_automatic_optimisation_is_the_hand_written_loop(method):
    trained, plain = assert_trained_alike(method, {}, {}), network()
    by_hand("plain", plain)
    assert differ(trained, plain)


def test_weight_zero_is_the_plain_module():
    regularised, plain = Classifier("dcl", network(), weight=0.0), Classifier("plain", network())
    fit(regularised)
    fit(plain)
    assert_same(regularised, plain)


def test_automatic_optimisation_is_the_papers_algorithm():
    module, model = Classifier("dcl", network()), network()
    optimizer = fit(module)
    companion = copy.deepcopy(model)
    bases = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for m in (model, companion)]
    torch.manual_seed(3)
    for x, y in [*loader()] * 2:
        dcl_step(model, companion, *bases, x, y, nn.CrossEntropyLoss(), mse)
    assert_same(module.net, model, rtol=1e-9, atol=1e-12)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_accumulate_grad_batches_is_the_hand_written_accumulation(method):
    trained = assert_trained_alike(method, {"accumulate_grad_batches": 3}, {"accumulate": 3})
    unaccumulated = network()
    by_hand(method, unaccumulated)
    assert differ(trained, unaccumulated)


def test_the_factor_of_accumulation_is_read_and_a_step_is_three_batches():
    optimizer = fit(Classifier("dcl", network()), accumulate_grad_batches=3)
    assert optimizer.logs()["loss_scale"] == pytest.approx(1 / 3, rel=1e-12)
    assert optimizer.logs()["step"] == 2 * 3, "batches 3, 6 and the last one, in two epochs"


CLIPS = {
    "norm": functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05),
    "value": functools.partial(nn.utils.clip_grad_value_, clip_value=0.01),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.05), ("value", 0.01)])
def test_gradient_clip_val_clips_loss_and_penalty_together(method, algorithm, limit):
    options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    clipped, unclipped = assert_trained_alike(method, options, {"clip": CLIPS[algorithm]}), network()
    by_hand(method, unclipped)
    assert differ(clipped, unclipped)


@pytest.mark.parametrize("method", METHODS)
def test_bf16_mixed_runs_model_and_companion_in_bfloat16(method):
    hand = {"autocast": torch.autocast("cpu", dtype=torch.bfloat16)}
    rounded, full = (
        assert_trained_alike(method, {"precision": "bf16-mixed"}, hand, torch.float32),
        network(torch.float32),
    )
    by_hand(method, full, data=loader(torch.float32))
    assert differ(rounded, full)


def test_bf16_mixed_is_in_force_where_the_companion_runs():
    dtypes, net = [], network(torch.float32)
    # Of all modules: the companion gets no hook of the model's that reports to the script.
    note = register_module_forward_hook(
        lambda module, args, output: dtypes.append(output.dtype) if type(module) is type(net) else None
    )
    with note:
        fit(Classifier("dcl", net), loader(torch.float32), precision="bf16-mixed")
    assert dtypes == [torch.bfloat16] * 2 * (2 * BATCHES)


SCHEDULES = {
    "step": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=2 * BATCHES + 1),
    "epoch": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("interval", SCHEDULES)
def test_a_scheduler_in_the_returned_dict_drives_both_learning_rates(method, interval):
    schedule = {"scheduler": SCHEDULES[interval], "interval": interval}
    scheduled, constant = assert_trained_alike(method, {"module": schedule}, schedule), network()
    by_hand(method, constant)
    assert differ(scheduled, constant)


def test_schedules_of_weight_and_alpha_count_the_trainers_steps():
    settings = {"weight": LinearWarmup(1.0, steps=10), "alpha": RunningAverage()}
    assert_trained_alike("dcl", {"module": settings}, settings)


@pytest.mark.parametrize("method", METHODS)
def test_validation_during_and_between_epochs_leaves_the_companion_alone(method):
    watched, unwatched = Validated(method, network()), Classifier(method, network())
    expected = fit(unwatched)
    trainer = quiet_trainer(val_check_interval=3, num_sanity_val_steps=2)
    torch.manual_seed(3)
    trainer.fit(watched, loader(), loader(seed=9))
    assert trainer.callback_metrics["validation_loss"] > 0
    assert_same(watched.net, unwatched.net)
    assert_same(trainer.optimizers[0].state_dict(), expected.state_dict())


# ---- which object to wrap -------------------------------------------------------------------------------------------


class CallsItself(Classifier):
    """The other habit: ``self(x)`` in training_step."""

    wrapped = "self"

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return DCLOptimizer(optimizer, self if self.wrapped == "self" else self.net, weight=1.0)


@pytest.mark.parametrize("wrapped", ["self", "net"])
def test_where_training_step_calls_self_both_self_and_its_network_can_be_wrapped(wrapped):
    module, net = CallsItself("dcl", network()), network()
    module.wrapped = wrapped
    ours, theirs = fit(module), by_hand("dcl", net)
    assert_same(module.net, net)
    companion = ours.companion.net if wrapped == "self" else ours.companion
    assert_same(companion, theirs.companion)


def test_a_companion_that_is_a_lightning_module_has_no_trainer_and_no_hooks():
    module = CallsItself("dcl", network())
    companion = fit(module).companion
    assert isinstance(companion, CallsItself)
    assert companion._trainer is None
    assert module.trainer is not None
    assert not companion._forward_hooks


class CallsAnother(CallsItself):
    """Wraps one object and calls another."""

    def __init__(self, wrapped, called):
        super().__init__("dcl", network())
        self.other = network()
        self.wrapped = wrapped
        self.call = {"other": self.other, "net": self.net, "net.forward": self.net.forward}[called]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self.call(x), y)


@pytest.mark.parametrize(("wrapped", "called"), [("net", "other"), ("self", "net"), ("net", "net.forward")])
def test_wrapping_an_object_that_training_step_does_not_call_is_an_error_at_the_first_step(wrapped, called):
    module = CallsAnother(wrapped, called)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=r"no backward through a training forward of the wrapped\s+model"):
        fit(module)
    weights = {name for name, _ in module.named_parameters()}
    assert_same({name: module.state_dict()[name] for name in weights}, {name: before[name] for name in weights})
