"""DCPOptimizer: the documentation of its arguments, the number of classes, and the ways of the labels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCPOptimizer
from dcl_optim.distances import mse
from tests import reference
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd, train


def wrap(model, **options):
    return DCPOptimizer(sgd(model), model, **{"weight": 1.0, "alpha": 0.6} | options)


# ---- the documentation -----------------------------------------------------------------------------------------------


def test_the_documentation_has_every_argument_with_its_default_and_no_other():
    arguments = inspect.getdoc(DCPOptimizer).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE)
    parameters = inspect.signature(DCPOptimizer).parameters
    assert dict(entries).keys() == parameters.keys()
    for name, text in entries:
        text = re.sub(r"\s+", " ", text)
        found = re.search(r"Default (True|\d+(?:\.\d+)?)\b|(None|``\S+``) \(default", text)
        default = parameters[name].default
        if default is inspect.Parameter.empty:
            assert found is None, name
        else:
            assert (found[1] or found[2].strip("`").strip('"')) == str(default), name


# ---- the classes -----------------------------------------------------------------------------------------------------


def test_the_number_of_classes_is_that_of_the_first_logits():
    results = []
    for number in (None, CLASSES):
        model = mlp()
        optimizer = wrap(model, num_classes=number)
        assert optimizer.prototypes.shape == (0, 0)
        train(model, optimizer, batches(5))
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


# ---- labels ----------------------------------------------------------------------------------------------------------


class WithLabels(nn.Module):
    """Like a Hugging Face model: labels go in, the loss comes out beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        z = self.net(x)
        return {"loss": F.cross_entropy(z, labels), "logits": z}


def of_the_model(model, optimizer, x, y):
    return model(x, labels=y)["loss"]


def by_the_line(model, optimizer, x, y):
    return F.cross_entropy(model(x, labels=y)["logits"], y)


def by_the_term(model, optimizer, x, y):
    """In another shape, in evaluation mode, and with a factor."""
    z = model.eval()(x, labels=y)["logits"]
    return (2 * F.cross_entropy(z, y) + 2 * optimizer.penalty(z.T[None], y[None])) / 2


@pytest.mark.parametrize("loss_of", [of_the_model, by_the_line, by_the_term])
def test_every_way_of_the_labels_is_the_reference(loss_of: Callable[..., Tensor]):
    model, theirs, prototypes, numbers = WithLabels(), mlp(), {}, {}
    optimizer, plain = wrap(model), sgd(theirs)
    for x, y in batches(10):
        optimizer.zero_grad()
        loss_of(model, optimizer, x, y).backward()
        optimizer.step()
        reference.dcp_step(theirs, prototypes, plain, x, y, F.cross_entropy, mse, numbers=numbers)
    rows = torch.stack([prototypes[k] for k in range(CLASSES)])
    found = model.net.state_dict(), optimizer.prototypes
    assert_same(found, (theirs.state_dict(), rows), rtol=1e-10, atol=1e-12)
