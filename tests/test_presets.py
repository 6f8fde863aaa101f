"""The defaults: what they are, and that the paper's settings are one word away."""

import pytest
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd

DEFAULT = {
    DCLOptimizer: {"weight": 0.1, "alpha": 0.6, "reduction": "mean", "distance": "mse"},
    DCPOptimizer: {"weight": 0.1, "alpha": 0.97, "reduction": "mean", "distance": "mse"},
}
PAPER = {"weight": 1.0, "alpha": 0.6, "reduction": "mean", "distance": "mse"}


def trained(kind, steps=6, **options):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    arguments = () if kind is DCLOptimizer else (CLASSES,)
    optimizer = kind(sgd(model), model, *arguments, criterion=criterion, **options)
    for x, y in batches(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("kind", DEFAULT)
def test_a_preset_is_its_arguments(kind):
    assert_same(trained(kind), trained(kind, **DEFAULT[kind]))
    assert_same(trained(kind, preset="paper"), trained(kind, **PAPER))
    with pytest.raises(AssertionError):
        assert_same(trained(kind), trained(kind, preset="paper"))


@pytest.mark.parametrize("kind", DEFAULT)
@pytest.mark.parametrize("given", [{"weight": 0.4}, {"weight": 0.0}, {"alpha": 0.2}, {"alpha": 0.0}])
def test_what_is_given_outranks_the_preset(kind, given):
    assert_same(trained(kind, **given), trained(kind, **(DEFAULT[kind] | given)))
    assert_same(trained(kind, preset="paper", **given), trained(kind, **(PAPER | given)))


@pytest.mark.parametrize("kind", DEFAULT)
def test_an_unknown_preset_is_refused(kind):
    with pytest.raises(ValueError, match="preset='fast' is unknown; choose one of default, paper"):
        trained(kind, preset="fast")
