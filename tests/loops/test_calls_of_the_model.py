"""Calls of the model that are no training forward pass, in the middle of one that is, from any thread."""

import threading

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import CLASSES, FEATURES, PATIENCE, batches, mlp
from tests.reference import EACH, EACH_WAY, assert_same_training, train, wrap


def predict(model):
    with torch.no_grad():
        assert model(torch.randn(4, FEATURES, dtype=torch.float64)).shape == (4, CLASSES)


def predict_in_another_thread(model):
    thread = threading.Thread(target=predict, args=(model,))
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("call", [predict, predict_in_another_thread])
@EACH_WAY
@EACH
def test_a_call_that_is_no_training_forward_pass_changes_nothing(variant, way, call):
    found = []
    for calls in (True, False):
        optimizer = wrap(variant, mlp())
        if calls:
            optimizer.model[1].register_forward_hook(
                lambda *_, model=optimizer.model: call(model) if torch.is_grad_enabled() else None
            )
        found.append(train(optimizer, batches(8), way, F.cross_entropy))
    assert_same_training(*found)
    assert found[0].logs() == found[1].logs()
