"""``optimizer.penalty(...)`` where the backward pass is split at the logits, or gradients are asked for before it."""

import pytest
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import batches, mlp
from tests.reference import CLOSE, assert_same_training, wrap

STEPS = 6
margins = F.multi_margin_loss


@pytest.mark.parametrize("way", ["detached", "reentrant checkpoint"])
def test_a_backward_pass_that_is_split_at_the_logits(way):
    """When the term's backward pass ends, no parameter has a gradient yet."""
    results = []
    for splits in (False, True):
        model = mlp()
        optimizer = wrap("dcp", model)

        def loss(z, y, optimizer=optimizer):
            return margins(z, y) + optimizer.penalty(z, y)

        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = model(x)
            if not splits:
                loss(z, y).backward()
            elif way == "detached":
                leaf = z.detach().requires_grad_()
                loss(leaf, y).backward()
                z.backward(leaf.grad)
            else:
                checkpoint(loss, z, y, use_reentrant=True).backward()
            optimizer.step()
        results.append(optimizer)
    assert_same_training(*results, **CLOSE)
