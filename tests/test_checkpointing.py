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


class Network(nn.Sequential):
    """Takes the labels too, so that they can be given as well as read."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


def network() -> Network:
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, CLASSES))
    layers[1].momentum = 0.0  # a recomputed batch moves the running statistics twice, with us and without
    return Network(*layers).double()


class InnerCheckpoint(nn.Module):
    """Checkpoints its body, as transformers do layer by layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self._reentrant = network(), reentrant

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.body[:4], x, use_reentrant=self._reentrant)
        return self.body[4](hidden)


def wrap(variant: str, model: nn.Module, given: bool):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if variant == "dcl":
        return DCLOptimizer(base, model, weight=1.0)
    labels = {"num_classes": CLASSES, "targets": lambda args, kwargs: args[1]} if given else {}
    return DCPOptimizer(base, model, weight=1.0, alpha=0.6, **labels)


def trained(variant: str, model: nn.Module, call, steps: int = 6, given: bool = False):
    """Two views a step, so that recomputations of one forward fall between the gradients of two."""
    optimizer = wrap(variant, model, given)
    torch.manual_seed(3)
    for x, y in batches(steps):
        x.requires_grad_()  # a reentrant checkpoint needs it
        optimizer.zero_grad()
        sum(F.cross_entropy(call(view, y), y) for view in (x, 2 * x)).backward()
        optimizer.step()
    state = optimizer.state_dict()[f"dcl_optim.{type(optimizer).__name__}"]
    own = list(state["forecaster"]["model"].values()) if variant == "dcl" else list(state["forecaster"].values())
    return list(model.parameters()), [tensor for tensor in own if tensor.is_floating_point()]


@BOTH
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_the_whole_model_checkpointed_equals_plain(variant, reentrant):
    model, plain = network(), network()
    expected = trained(variant, plain, plain, given=True)
    found = trained(variant, model, lambda x, y: checkpoint(model, x, y, use_reentrant=reentrant))
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


@BOTH
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_blocks_checkpointed_inside_the_model_equal_plain(variant, reentrant):
    model, plain = InnerCheckpoint(reentrant), InnerCheckpoint(reentrant)
    plain.forward = plain.body.forward
    expected = trained(variant, plain, plain, given=True)
    found = trained(variant, model, model)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
