"""The step: what it returns and logs, the errors that it raises, and wrapping again."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer, distances
from tests import reference
from tests.helpers import CLASSES, FEATURES, assert_same, batches, fit, mlp, one, sgd, train
from tests.reference import ALPHA, EACH, NEAR, WEIGHT, wrap

METHOD = {"weight": WEIGHT, "alpha": ALPHA}

# ---- the step --------------------------------------------------------------------------------------------------------


def test_step_returns_the_loss_without_the_penalty():
    model = mlp()
    optimizer = wrap("dcl", model, companion=mlp(seed=3), weight=10.0)
    x, y = one()
    expected = F.cross_entropy(mlp()(x), y).item()
    assert optimizer.step(lambda: F.cross_entropy(model(x), y)).item() == pytest.approx(expected, abs=1e-12)


def test_logs():
    model = mlp()
    optimizer = wrap("dcl", model, weight=lambda t: 0.1 * t, alpha=0.25, companion=mlp(seed=3))
    before = optimizer.logs()
    assert before.pop("step") == before.pop("skipped") == 0.0
    assert list(before) == ["penalty", "weight", "alpha", "loss_scale"]
    assert all(map(math.isnan, before.values()))
    x, y = one()
    expected = F.mse_loss(model(x), optimizer.companion(x)).item()
    fit(optimizer, [(x, y)])
    logs = optimizer.logs()
    assert logs["penalty"] == pytest.approx(expected, abs=1e-12)
    assert (logs["step"], logs["weight"], logs["alpha"]) == (1.0, 0.1, 0.25)
    assert optimizer.logs(prefix="dcl/") == {f"dcl/{name}": value for name, value in logs.items()}
    assert logs["loss_scale"] == pytest.approx(1.0)


@EACH
def test_an_empty_first_group(variant):
    def run(groups):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES).double()
        base = torch.optim.SGD([*groups, {"params": model.parameters()}], lr=0.1)
        optimizer = wrap(variant, model, base)
        fit(optimizer, batches(3))
        return model.state_dict()

    assert_same(run([{"params": [], "weight_decay": 0.5}]), run([]))


def test_strict_false_allows_unregularized_steps():
    model = mlp().eval()
    alone = copy.deepcopy(model)
    train(model, wrap("dcl", model, strict=False), batches(3))
    train(alone, sgd(alone), batches(3))
    assert_same(model, alone)


# ---- one network, wrapped more than once -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["detach", "wrapping again"])
def test_wrapped_again_starts_with_a_new_companion_and_the_same_base(by):
    model, theirs = mlp(), mlp()
    base, plain = sgd(model), sgd(theirs)
    data = list(batches(15))
    optimizer = wrap("dcl", model, base)
    fit(optimizer, data[:5])
    if by == "detach":
        optimizer.detach()
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        fit(optimizer, data[5:10])
    again = wrap("dcl", model, base)
    fit(again, data[10:])

    for part, regularized in ((data[:5], True), (data[5:10], False), (data[10:], True)):
        companion = copy.deepcopy(theirs)
        second = sgd(companion)
        for x, y in part:
            if regularized:
                reference.dcl_step(theirs, companion, plain, second, x, y, F.cross_entropy, distances.squared, **METHOD)
            elif by == "detach":
                train(theirs, plain, [(x, y)])
    assert_same((model, again.companion), (theirs, companion), **NEAR)


# ---- steps without a batch -------------------------------------------------------------------------------------------


@EACH
def test_steps_of_a_model_that_was_built_again_log_no_old_figures(variant):
    """As torch, which does not tell a model that its optimizer does not train."""
    model, again = mlp(), mlp(seed=1)
    optimizer = wrap(variant, model)
    fit(optimizer, batches(2))
    train(again, optimizer, batches(19))
    logs = optimizer.logs()
    assert logs["step"] == 21
    assert all(math.isnan(logs[name]) for name in ("penalty", "weight", "alpha", "loss_scale"))
    fit(optimizer, batches(1))
    assert optimizer.logs()["penalty"] > 0


def test_a_name_may_be_asked_for_before_the_constructor():
    class Flagged(DCPOptimizer):
        def __init__(self, *arguments):
            self.had_flag = hasattr(self, "flag")
            super().__init__(*arguments)

    model = mlp()
    assert not Flagged(sgd(model), model).had_flag
