"""``step(closure)``: LBFGS, what a closure returns, and gradients that it asks for."""

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim import DCLOptimizer
from tests.helpers import assert_same, assert_same_networks, backward, batches, mlp, one, sgd
from tests.reference import EACH, NEAR, assert_same_training, by_hand, train_by_closures, wrap

STEPS = 6


# ---- LBFGS -----------------------------------------------------------------------------------------------------------


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def with_lbfgs(variant):
    """LBFGS cannot train a companion."""
    model, options = mlp(), {"companion_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    return wrap(variant, model, lbfgs(model), **options if variant == "dcl" else {})


@EACH
def test_lbfgs_minimizes_the_sum_and_the_first_evaluation_is_learned_from(variant):
    model = mlp()
    runs = with_lbfgs(variant), by_hand(variant, model, lbfgs(model))
    for trained in runs:
        train_by_closures(trained, batches(STEPS), F.multi_margin_loss)
    assert_same_training(*runs, **NEAR)  # the line search divides by small differences


def test_lbfgs_with_a_closure_that_returns_a_number():
    """As torch types it: the same run as with a tensor."""
    models = []
    for convert in (Tensor.item, Tensor.detach):
        model = mlp()
        optimizer = wrap("dcp", model, lbfgs(model))
        for x, y in batches(3):

            def closure(x=x, y=y, model=model, optimizer=optimizer, convert=convert):
                optimizer.zero_grad()
                z = model(x)
                loss = F.cross_entropy(z, y) + optimizer.penalty(z, y)
                loss.backward()
                return convert(loss)

            optimizer.step(closure)
        models.append(model.state_dict())
    assert_same(*models)


# ---- what a closure does ---------------------------------------------------------------------------------------------


def test_a_closure_with_a_graph_of_its_gradients_keeps_it():
    def run(wrapped):
        model = mlp()
        optimizer = sgd(model)
        if wrapped:
            optimizer = DCLOptimizer(optimizer, model, weight=0.0, strict=False, companion_fraction=1)
        x, y = one()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(create_graph=True)
            return loss

        optimizer.step(closure)
        found = [parameter.grad.grad_fn is not None for parameter in model.parameters()]
        optimizer.zero_grad()  # the graph and the gradients hold each other
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of that cycle
        assert run(True) == run(False)


def test_a_closure_after_a_backward_whose_step_never_came():
    model, expected = mlp(), mlp()
    optimizer, calm = wrap("dcl", model), wrap("dcl", expected)
    backward(model, *one(x_seed=9))  # a script's guard against outliers leaves this step out
    x, y = one()

    def closure(network, chosen):
        chosen.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        return loss

    optimizer.step(lambda: closure(model, optimizer))
    calm.step(lambda: closure(expected, calm))
    assert_same_networks(optimizer, calm)
