"""A loss that the line cannot read is an error with what was seen and the fix: the term."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from tests.helpers import mlp, one, sgd


def binary(z, y):
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z))


def mixed(z, y):
    return 0.6 * F.cross_entropy(z, y) + 0.4 * F.cross_entropy(z, y.flip(0))


def with_weights(z, y):
    return F.cross_entropy(z, y, torch.linspace(0.5, 2.0, z.shape[1]).to(z), label_smoothing=0.1)


NOT_0, IS_0 = (
    "do not sum to 0, as of sigmoid outputs, probabilities, regression",
    "rows have different factors, as with class weights",
)
LOSSES = {
    "sigmoid": (binary, [], NOT_0),
    "one logit": (lambda z, y: F.mse_loss(z[:, 0], y.double()), [nn.Linear(5, 1).double()], "one logit a row"),
    "nll": (F.nll_loss, [], NOT_0),
    "hidden states": (  # as F.linear_cross_entropy takes
        lambda h, y: F.cross_entropy(F.linear(h, torch.ones(7, h.shape[1]).tril().to(h)), y),
        [],
        "do not sum to 0, as of .*hidden states that the loss takes to the last layer",
    ),
    "temperature": (lambda z, y: F.cross_entropy(z / 2, y), [], IS_0),
    "class weights with smoothing": (with_weights, [], IS_0),
    "three classes, mixed": (mixed, [nn.Linear(5, 3).double()], IS_0),
    "two classes, mixed": (mixed, [nn.Linear(5, 2).double()], IS_0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_read_is_an_error_with_what_was_seen_and_the_term(name):
    loss, layers, seen = LOSSES[name]
    torch.manual_seed(0)
    model = mlp().extend(layers)
    optimizer = DCPOptimizer(sgd(model), model)
    x, y = one()
    value = loss(model(x), y % min(3, model(x).shape[1]))
    fix = r"loss \+ optimizer\.penalty\(logits, labels\)"
    message = rf"cannot read the labels.*\n  Seen: .*{seen}.*\n  Fix: .*{fix}.*\. See docs/losses\.md"
    with pytest.raises(RuntimeError, match=message) as caught:
        value.backward()
    assert len(str(caught.value).splitlines()) == 3
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (optimizer.logs()["step"], optimizer.prototypes.numel()) == (0, 0)


def focal(z, y):
    nll = F.cross_entropy(z, y, reduction="none")
    return ((1 - nll.neg().exp()) ** 2 * nll).mean()


def train_with_a_focal_loss(number, every):
    """While all predictions are alike, as those of a head of zeros, it has the gradient of a plain cross-entropy."""
    torch.manual_seed(0)
    model = mlp()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    optimizer = DCPOptimizer(sgd(model), model)
    x, y = one()
    for step in range(number):
        optimizer.zero_grad()
        (F.cross_entropy if step % every else focal)(model(x), y).backward()
        optimizer.step()
    return optimizer.logs()["skipped"]


@pytest.mark.filterwarnings("ignore:a batch gets no penalty")
def test_a_head_of_zeros_shows_what_the_loss_is_later():
    assert train_with_a_focal_loss(20, every=1) == 19
    assert train_with_a_focal_loss(60, every=2) == 29
    with pytest.raises(RuntimeError, match="rows have different factors"):
        train_with_a_focal_loss(21, every=1)
