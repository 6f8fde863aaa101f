"""Several backward passes before a step: through several forward passes or one, each row is learned from once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim.distances import squared
from tests import reference
from tests.helpers import CLASSES, assert_same, batches, mlp, one, sgd
from tests.reference import ALPHA, VARIANTS, WEIGHT, learned, term_of, wrap

WAYS = ("line", "term")


@pytest.mark.parametrize("names_inputs", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_loss_that_go_backward_one_by_one_carry_the_whole_penalty(variant, way, names_inputs):
    model, hand = mlp(), mlp()
    companion, prototypes, numbers = mlp(seed=3), dict[int, Tensor](), dict[int, float]()
    optimizer = wrap(variant, model, **{"companion": mlp(seed=3)} if variant == "dcl" else {})
    base, second = sgd(hand), sgd(companion)
    settings = {"weight": WEIGHT, "alpha": ALPHA}
    for x, y in batches(5):
        optimizer.zero_grad()
        z = model(x)
        loss = F.cross_entropy(z, y) + term_of(optimizer, way)(z, y)
        for share in (0.25, 0.6, 0.15):
            inputs = {"inputs": [*model.parameters()]} if names_inputs else {}
            (share * loss).backward(retain_graph=True, **inputs)
            assert optimizer.logs()["loss_scale"] == pytest.approx(share)
        optimizer.step()
        if variant == "dcl":
            reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, squared, **settings)
        else:
            reference.dcp_step(hand, prototypes, base, x, y, F.cross_entropy, squared, **settings, numbers=numbers)
    assert_same(model, hand, rtol=1e-10, atol=1e-10)
    rows = {"prototypes": torch.stack([prototypes[k] for k in range(CLASSES)])} if variant == "dcp" else None
    assert_same(learned(optimizer), rows or dict(companion.state_dict()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
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
