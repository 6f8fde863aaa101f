"""Weights that are loaded in the middle of a run, whose prototypes are those of other weights."""

import copy

import pytest
import torch.nn.functional as F

from tests.helpers import batches, mlp
from tests.reference import EACH_WAY, train, wrap

LOADED = r"weights were loaded into the model since(?s:.*)DCPOptimizer\(optimizer\.base, model\)"


@EACH_WAY
def test_weights_loaded_in_mid_run_are_warned_of_once(way):
    model = mlp()
    optimizer = wrap("dcp", model)
    first = copy.deepcopy(model.state_dict())

    def fold():
        train(optimizer, batches(3), way, F.cross_entropy)

    model.load_state_dict(first)  # before training
    fold()
    model.load_state_dict(first)
    with pytest.warns(UserWarning, match=LOADED) as caught:
        fold()
    model.load_state_dict(first)
    fold()
    assert len(caught) == 1
    optimizer = wrap("dcp", model)  # the fix
    fold()
