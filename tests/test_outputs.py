"""What hooks find in a model's output: logits, a loss of its own, the tensor that logits were converted from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.hooks.outputs import conversion_source, find_loss
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd, train


class Converting(nn.Module):
    """Takes its loss from its logits and returns converted ones, as accelerate's mixed precision makes models do."""

    def __init__(self, loss_of) -> None:
        super().__init__()
        self.body, self._loss_of = mlp(dtype=torch.float32), loss_of

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": self._loss_of(logits, labels), "logits": logits.double()}


LOSSES = {
    "cross-entropy": F.cross_entropy,
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype)),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_loss_taken_before_the_logits_were_converted(variant, loss_of):
    """Equal to the plain loop on the body; the factor on the model's own loss is read where cross-entropy's is not."""
    model, plain = Converting(loss_of), mlp(dtype=torch.float32)
    if variant == "dcl":
        optimizer, expected = (
            DCLOptimizer(sgd(model), model, weight=1.0),
            DCLOptimizer(sgd(plain), plain, loss_scale=0.5, weight=1.0),
        )
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, targets="labels", weight=1.0, alpha=0.6)
        expected = DCPOptimizer(sgd(plain), plain, CLASSES, loss_scale=0.5, weight=1.0, alpha=0.6)
    for x, y in batches(5, dtype=torch.float32):
        optimizer.zero_grad()
        (0.5 * model(x, labels=y)["loss"]).backward()
        optimizer.step()
        expected.zero_grad()
        if variant == "dcp":
            expected.set_targets(y)
        (0.5 * loss_of(plain(x), y)).backward()
        expected.step()
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.5, rel=1e-5)
    assert_same(model.body, plain, rtol=1e-4, atol=1e-6)


def test_a_loss_on_the_converted_logits_counts_once():
    model, plain = nn.Sequential(mlp(dtype=torch.float32), ToDouble()), mlp(dtype=torch.float32)
    train(model, DCLOptimizer(sgd(model), model, weight=1.0), batches(4, dtype=torch.float32))
    train(plain, DCLOptimizer(sgd(plain), plain, weight=1.0), batches(4, dtype=torch.float32))
    assert_same(model[0], plain, rtol=1e-4, atol=1e-6)


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


def test_conversion_source():
    leaf = torch.ones(2, 3, requires_grad=True)
    computed = leaf * 2
    assert conversion_source(computed) is None
    assert conversion_source(leaf.double()) is None, "nothing was computed before"
    node, index = conversion_source(computed.double().half())
    assert node is computed.grad_fn
    assert index == 0


def test_find_loss():
    loss = torch.ones(2, requires_grad=True).sum()
    assert find_loss({"loss": loss}) is loss
    assert find_loss({"loss": loss.detach()}) is None
    assert find_loss({"loss": torch.ones(2, requires_grad=True) * 2}) is None
    assert find_loss(loss) is None
    assert find_loss(({"loss": loss},)) is None


def test_of_two_scalars_neither_is_the_models_loss():
    first, second = (torch.ones(2, requires_grad=True).sum() for _ in range(2))
    assert find_loss((torch.ones(2, 3), first)) is first
    assert find_loss((torch.ones(2, 3), first, second.detach())) is first
    assert find_loss((torch.ones(2, 3), first, second)) is None
