"""Weights that are loaded in the middle of a run, whose prototypes or companion are those of other weights."""

import copy

import pytest
import torch.nn.functional as F

from tests.helpers import batches, mlp
from tests.reference import EACH_WAY, train, wrap

LOADED = r"weights were loaded into the model since(?s:.*)"
FIX = {"dcp": r"DCPOptimizer\(optimizer\.base, model\)", "dcl": r"optimizer\.reset_companion\(\)"}


@EACH_WAY
@pytest.mark.parametrize("variant", FIX)
def test_weights_loaded_in_mid_run_are_warned_of_once(variant, way):
    model = mlp()
    optimizer = wrap(variant, model)
    first = copy.deepcopy(model.state_dict())

    def fold():
        train(optimizer, batches(3), way, F.cross_entropy)

    def load_and_fix():
        model.load_state_dict(first)
        if variant == "dcl":
            optimizer.reset_companion()
            return optimizer
        return wrap("dcp", model)

    model.load_state_dict(first)  # before training
    fold()
    optimizer = load_and_fix()
    fold()
    model.load_state_dict(first)
    with pytest.warns(UserWarning, match=LOADED + FIX[variant]) as caught:
        fold()
    model.load_state_dict(first)
    fold()
    assert len(caught) == 1
