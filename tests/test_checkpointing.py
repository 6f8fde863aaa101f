"""Activation checkpointing: recomputation inside backward must neither add the penalty twice nor lose it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, CLASSES))
    layers[1].momentum = 0.0  # a recomputed batch moves the running statistics twice, with us and without
    return nn.Sequential(*layers).double()


class InnerCheckpoint(nn.Module):
    """Checkpoints its body, as transformers do layer by layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self._reentrant = network(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.body[:4], x, use_reentrant=self._reentrant)
        return self.body[4](hidden)


def trained(variant: str, model: nn.Module, call):
    """Two views a step, so that recomputations of one forward fall between the gradients of two."""
    kind = DCLOptimizer if variant == "dcl" else DCPOptimizer
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, weight=1.0)
    torch.manual_seed(3)
    for x, y in batches(6):
        x.requires_grad_()  # a reentrant checkpoint needs it
        optimizer.zero_grad()
        sum(F.cross_entropy(call(view), y) for view in (x, 2 * x)).backward()
        optimizer.step()
    own = optimizer.companion.parameters() if variant == "dcl" else [optimizer.prototypes]
    return [*model.parameters(), *own]


@BOTH
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_the_whole_model_checkpointed_equals_plain(variant, reentrant):
    model, plain = network(), network()
    found = trained(variant, model, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert_same(found, trained(variant, plain, plain))


@BOTH
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_blocks_checkpointed_inside_the_model_equal_plain(variant, reentrant):
    model, plain = InnerCheckpoint(reentrant), InnerCheckpoint(reentrant)
    plain.forward = plain.body.forward
    assert_same(trained(variant, model, model), trained(variant, plain, plain))
