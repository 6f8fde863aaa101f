"""Activation checkpointing: recomputation inside backward must neither add the penalty twice nor lose it."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.helpers import CLASSES, FEATURES, batches
from tests.reference import VARIANTS, assert_same_training, term_of, wrap


class Blocks(nn.Sequential):
    """Recomputes its body in the backward pass, as transformers do layer by layer, if told so."""

    reentrant: bool | None = None

    def forward(self, x):
        if self.reentrant is None:
            return super().forward(x)
        return self[-1](checkpoint(self[:-1], x, use_reentrant=self.reentrant))


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, CLASSES))
    layers[1].momentum = 0.0  # a recomputed batch moves the running statistics twice, with us and without
    layers[1].register_buffer("num_batches_tracked", None)
    return Blocks(*layers).double()


def trained(variant, way, whole, reentrant):
    """Two views a step, so that recomputations of one forward pass fall between the gradients of two."""
    optimizer = wrap(variant, network())
    call, term = optimizer.model, term_of(optimizer, way)
    if whole and reentrant is not None:
        call = partial(checkpoint, call, use_reentrant=reentrant)
    else:
        call.reentrant = reentrant
    torch.manual_seed(3)
    for x, y in batches(6):
        x.requires_grad_()  # a reentrant checkpoint needs it
        optimizer.zero_grad()
        outputs = [call(view) for view in (x, 2 * x)]
        sum(F.cross_entropy(z, y) + term(z, y) for z in outputs).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("variant", "way", "whole", "reentrant"),
    [
        cell
        for cell in product(VARIANTS, ["line", "term"], [False, True], [False, True])
        if cell != ("dcl", "term", True, True)
    ],
)
def test_checkpointed_equals_plain(variant, way, whole, reentrant):
    """A reentrant checkpoint runs the whole model without gradients: what it returns, only prototypes take."""
    assert_same_training(trained(variant, way, whole, reentrant), trained(variant, way, whole, None))


def test_a_forward_pass_that_is_recomputed_is_predicted_once():
    optimizer = wrap("dcl", network())
    calls = []
    optimizer.companion.register_forward_hook(lambda *_: calls.append(1))
    for x, y in batches(3):
        optimizer.zero_grad()
        with set_checkpoint_early_stop(False):
            F.cross_entropy(checkpoint(optimizer.model, x, use_reentrant=False), y).backward()
        optimizer.step()
    assert len(calls) == 3
