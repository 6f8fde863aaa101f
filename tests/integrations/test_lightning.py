"""Lightning's automatic optimization: one line of configure_optimizers is ours, the rest is the user's."""

import pytest
import torch

from tests.helpers import assert_same, linear_growth, running_average
from tests.integrations import EACH_METHOD, differ
from tests.integrations.lightning_modules import (
    QUIET,
    Classifier,
    by_hand,
    fit,
    loader,
    network,
    one_cycle,
)

pytestmark = QUIET


# ---- the loop -------------------------------------------------------------------------------------------------------


# What Trainer, the module and the loop by hand are told.
LOOPS = {
    "plain": ({}, {}, {}),
    "accumulation": ({"accumulate_grad_batches": 3}, {}, {"accumulate": 3}),
    "bfloat16": ({"precision": "bf16-mixed"}, {}, {"autocast": torch.autocast("cpu", dtype=torch.bfloat16)}),
    "learning rates": ({}, {"scheduler": one_cycle}, {"scheduler": one_cycle}),
    "weight and alpha": ({}, *({"weight": linear_growth, "alpha": running_average} for _ in range(2))),
}


@EACH_METHOD
@pytest.mark.parametrize("loop", LOOPS)
def test_automatic_optimization_is_the_hand_written_loop_bit_for_bit(loop, method):
    of_trainer, of_module, of_hand = LOOPS[loop]
    dtype = torch.float32 if loop == "bfloat16" else torch.float64
    module, net, other = Classifier(method, network(dtype), **of_module), network(dtype), network(dtype)
    ours = fit(module, loader(dtype), **of_trainer)
    theirs = by_hand(method, net, data=loader(dtype), **of_hand)
    assert_same(module.net, net)
    assert_same(ours.state_dict(), theirs.state_dict())
    by_hand("plain" if loop == "plain" else method, other, data=loader(dtype))
    assert differ(net, other)
    if loop == "accumulation":
        assert ours.logs()["loss_scale"] == pytest.approx(1 / 3, rel=1e-12)
        assert ours.logs()["step"] == 2 * 3, "batches 3, 6 and the last one, in two epochs"
