"""Several backward passes before a step: through several forward passes or one, each row is learned from once."""

import pytest
import torch.nn.functional as F

from tests.helpers import assert_same, batches, mlp, one
from tests.reference import EACH, EACH_WAY, NEAR, assert_same_training, by_hand, loss_of, train, wrap


@pytest.mark.parametrize("names_inputs", [False, True])
@EACH_WAY
@EACH
def test_parts_of_a_loss_that_go_backward_one_by_one_carry_the_whole_penalty(variant, way, names_inputs):
    model = mlp()
    optimizer, hand = (
        make(variant, network, **{"companion": mlp(seed=3)} if variant == "dcl" else {})
        for make, network in ((wrap, model), (by_hand, mlp()))
    )
    for x, y in batches(5):
        optimizer.zero_grad()
        loss = loss_of(optimizer, x, y, way)
        for share in (0.25, 0.6, 0.15):
            inputs = {"inputs": [*model.parameters()]} if names_inputs else {}
            (share * loss).backward(retain_graph=True, **inputs)
            assert optimizer.logs()["loss_scale"] == pytest.approx(share)
        optimizer.step()
        train(hand, [(x, y)], loss=F.cross_entropy)
    assert_same_training(optimizer, hand, **NEAR)


@EACH
def test_a_forward_counts_once_and_is_learned_from_once(variant):
    """As if its last backward had not come: the second one changes neither the companion nor the prototypes."""
    found = []
    for times in (1, 3):
        model = mlp()
        optimizer = wrap(variant, model, **{"companion": mlp(seed=1)} if variant == "dcl" else {})
        z = model(one()[0])
        for _ in range(times):
            optimizer.zero_grad()
            F.cross_entropy(z, one()[1]).backward(retain_graph=True)
        optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)
