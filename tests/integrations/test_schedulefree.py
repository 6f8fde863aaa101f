"""Schedule-Free optimizers: train() and eval() through the wrapper move both networks between y and x."""

import copy
from functools import partial

import pytest
import schedulefree
import torch
import torch.nn.functional as F

from dcl_optim.distances import mse
from tests.helpers import (
    assert_same,
    assert_same_networks,
    batch_norm_net,
    batches,
    fit,
    mlp,
    through_a_file,
)
from tests.helpers import wrap as wrap_dcl
from tests.reference import assert_same_training, by_hand, dcl_step, train_by_closures, wrap

WEIGHT = 0.4
SETTINGS = {
    "sgd": (schedulefree.SGDScheduleFree, {"lr": 0.3, "warmup_steps": 3, "weight_decay": 1e-3}),
    "sgd, one by one": (schedulefree.SGDScheduleFree, {"lr": 0.3, "foreach": False}),
    "adamw": (schedulefree.AdamWScheduleFree, {"lr": 0.02, "warmup_steps": 4, "weight_decay": 1e-2, "r": 1.0}),
    "radam": (schedulefree.RAdamScheduleFree, {"lr": 0.02}),
    "sgd, reference": (schedulefree.SGDScheduleFreeReference, {"lr": 0.3}),
    "adamw, reference": (schedulefree.AdamWScheduleFreeReference, {"lr": 0.02}),
}
PER_NAME = pytest.mark.parametrize("name", SETTINGS)


def make(name, parameters):
    optimizer_class, options = SETTINGS[name]
    return optimizer_class(parameters, **options)


def switch(mode, *optimizers):
    for optimizer in optimizers:
        getattr(optimizer, mode)()


@PER_NAME
@pytest.mark.parametrize("network", [mlp, batch_norm_net])
def test_the_trajectory_is_that_of_two_schedule_free_optimizers_written_out(name, network):
    """With an evaluation in the middle, and another learning rate afterwards."""
    hand, model = network(), network()
    companion = copy.deepcopy(hand)
    base, second = make(name, hand.parameters()), make(name, companion.parameters())
    optimizer = wrap_dcl(model, make(name, model.parameters()), weight=WEIGHT)
    for part, lr in ((list(batches(18))[:9], None), (list(batches(18))[9:], 0.05)):
        for each in (base, second, optimizer):
            each.param_groups[0]["lr"] = each.param_groups[0]["lr"] if lr is None else lr
        switch("train", base, second, optimizer)
        for x, y in part:
            dcl_step(hand, companion, base, second, x, y, F.cross_entropy, mse, weight=WEIGHT)
        fit(optimizer, part)
        assert_same((hand, companion), (model, optimizer.companion), atol=1e-8)
        at_y = copy.deepcopy(optimizer.companion)
        switch("eval", base, second, optimizer)
        assert_same((hand, companion), (model, optimizer.companion), atol=1e-8)
    assert not torch.equal(at_y[0].weight, optimizer.companion[0].weight)


@PER_NAME
def test_a_run_resumed_from_a_checkpoint_in_eval_mode_is_the_uninterrupted_one_bit_for_bit(name):
    model, resumed, data = mlp(), mlp(seed=5), list(batches(8))
    optimizer = wrap_dcl(model, make(name, model.parameters()), weight=WEIGHT)
    optimizer.train()
    fit(optimizer, data[:4])
    optimizer.eval()
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.train()
    fit(optimizer, data[4:])

    second = wrap_dcl(resumed, make(name, resumed.parameters()), weight=WEIGHT)
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    second.train()
    fit(second, data[4:])
    assert_same_networks(optimizer, second)


CLOSURES = {
    "sgd": (schedulefree.SGDScheduleFreeClosure, 0.3),
    "adamw": (schedulefree.AdamWScheduleFreeClosure, 0.02),
    "radam": (schedulefree.RAdamScheduleFreeClosure, 0.02),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_a_variant_that_steps_with_a_closure_only_regularizes_the_gradient_at_y_by_the_mend(name):
    kind, lr = CLOSURES[name]
    hand, model = mlp(), mlp()
    with pytest.raises(ValueError, match=r"steps with a closure only.*pass\s+companion_optimizer="):
        wrap_dcl(model, kind(model.parameters()))
    second = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = wrap("dcl", model, kind(model.parameters(), lr=lr), companion_optimizer=second)
    written_out = by_hand("dcl", hand, kind(hand.parameters(), lr=lr))
    for each in (optimizer, written_out):
        train_by_closures(each, batches(6), F.multi_margin_loss)
    assert_same_training(optimizer, written_out, atol=1e-8)
