"""Wrappers that nobody holds, and steps of a model that nobody calls."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch.nn.functional as F

from tests.helpers import assert_same, backward, batches, fit, mlp, one, sgd, train
from tests.reference import EACH, EACH_WAY, loss_of, wrap
from tests.reference import train as train_by_term


@EACH
def test_a_wrapper_that_is_not_kept_is_said_once(variant):
    """A pass in evaluation mode before the training, or without gradients, says nothing."""
    model = mlp()
    base = sgd(model)
    wrap(variant, model, base)
    model.eval()(one()[0])
    model.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # which shows what comes from one line once
        train(model, base, batches(3))
    (said,) = [str(warning.message) for warning in caught]
    assert said.startswith("the model is trained, but the DCPOptimizer or DCLOptimizer around its optimizer is gone")
    assert "\n  Fix: optimizer = DCPOptimizer(optimizer, model), and step it" in said


@EACH
@pytest.mark.parametrize("after", ["a step", "detach", "another wrapper", "a copy"])
def test_a_model_that_goes_on_without_its_wrapper_is_right(variant, after):
    model = mlp()
    optimizer = wrap(variant, model)
    if after == "a step":
        fit(optimizer, batches(1))
    elif after == "detach":
        optimizer.detach()
    elif after == "a copy":
        model = copy.deepcopy(model)
    base = sgd(model)
    del optimizer
    if after == "another wrapper":
        base = wrap(variant, model, base)
    train(model, base, batches(2))


@EACH
@pytest.mark.parametrize("trained", ["built again", "a copy"])
def test_a_second_step_without_gradients_and_forward_pass_is_said(variant, trained):
    model = mlp()
    optimizer = wrap(variant, model)
    other = mlp() if trained == "built again" else copy.deepcopy(model)
    backward(other, *one())
    optimizer.step()  # as scripts do so that a scheduler does not warn
    with pytest.warns(UserWarning, match=r"step found no gradients.*\n  Fix: wrap the model that is called"):
        optimizer.step()
    optimizer.step()  # said once: a warning would be an error


def test_the_term_on_another_network_than_the_optimizers_is_said_at_the_first_step():
    """DCP's takes logits of any network."""
    optimizer = wrap("dcp", mlp())
    other = copy.deepcopy(optimizer.model)
    for number in range(2):
        z, y = other(one()[0]), one()[1]
        (F.cross_entropy(z, y) + optimizer.penalty(z, y)).backward()
        with pytest.warns(UserWarning, match="step found no gradients of") if not number else nullcontext():
            optimizer.step()


@EACH_WAY
@EACH
def test_gradients_that_are_cleared_before_the_step_are_said_at_the_first_one(variant, way):
    optimizer = wrap(variant, mlp())
    for number in range(2):
        loss_of(optimizer, *one(), way).backward()
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match=r"\n  Fix: .* Call zero_grad before") if not number else nullcontext():
            optimizer.step()


@EACH
def test_two_steps_after_one_backward_pass_are_an_error_also_with_the_term(variant):
    optimizer = wrap(variant, mlp())
    train_by_term(optimizer, [one()])
    before = copy.deepcopy(optimizer.model.state_dict())
    with pytest.raises(RuntimeError, match=r"step was called twice.*\n  Fix: call step once"):
        optimizer.step()
    assert_same(optimizer.model.state_dict(), before)
