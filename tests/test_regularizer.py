"""How forwards, backwards and steps are matched: what is regularised, and what is left alone."""

from __future__ import annotations

import copy
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import (
    FEATURES,
    assert_same,
    backward,
    batch_norm_net,
    batches,
    dropout_net,
    mlp,
    one,
    sgd,
    train,
    training_forwards,
    wrap,
)


def test_evaluation_is_left_alone():
    model = batch_norm_net()
    optimizer = wrap(model)
    companion = copy.deepcopy(optimizer.companion.state_dict())
    x, _ = one()
    stream = torch.get_rng_state()
    with torch.no_grad():
        model(x)
    model.eval()
    model(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), stream)
    assert_same(optimizer.companion.state_dict(), companion)
    assert math.isnan(optimizer.logs()["penalty"])


def test_forward_without_backward_never_trains_the_companion_and_frees_its_memory():
    with_extra = []
    for use in (False, True):
        model = mlp()
        optimizer = wrap(model)
        forwards = training_forwards(optimizer)
        for x, y in batches(5):
            optimizer.zero_grad()
            if use:
                extra = model(x + 1.0)  # training mode, never followed by a backward
                forward = forwards[-1]
                graph = weakref.ref(forward().prediction.learned)
                del extra
                assert forward() is None
                assert graph() is None
            backward(model, x, y)
            optimizer.step()
        with_extra.append([*model.parameters(), *optimizer.companion.parameters()])
    assert_same([p.detach() for p in with_extra[0]], [p.detach() for p in with_extra[1]])


def test_zero_grad_between_forward_and_backward():
    """Lightning's order: the same result as zero_grad first."""
    results = []
    for between in (False, True):
        model = mlp()
        optimizer = wrap(model)
        for x, y in batches(5):
            if not between:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if between:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


@pytest.mark.parametrize("clear", ["optimizer first", "optimizer between", "model"])
def test_a_step_that_never_came_is_dropped_when_the_next_accumulation_begins(clear):
    results = []
    for skipped in (False, True):
        model = mlp()
        optimizer = wrap(model, companion=mlp(seed=3))  # apart from the model, so that every batch pulls at it
        data = list(batches(6))
        if skipped:
            backward(model, *one(99))  # a gradient scaler found an infinity: no step
        for x, y in data:
            if clear == "optimizer first":
                optimizer.zero_grad()
            elif clear == "model":
                model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if clear == "optimizer between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


def test_two_backwards_of_one_forward_each_carry_their_own_factor():
    results = []
    for split in (False, True):
        model = mlp()
        optimizer = wrap(model, loss_scale=0.5 if split else 1.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            first, second = F.cross_entropy(z, y), z.square().mean()
            if split:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_gradients_inside_the_loss_are_left_alone():
    """A gradient penalty asks for d loss / d x with create_graph; only the outer backward is regularised."""
    model = mlp()
    optimizer = wrap(model, weight=5.0, companion=mlp(seed=3))
    x, y = one()
    x.requires_grad_()
    z = model(x)
    (inner,) = torch.autograd.grad(F.cross_entropy(z, y), x, create_graph=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(mlp()(x), y), x)
    assert_same(inner.detach(), expected, rtol=1e-12, atol=1e-14)
    assert math.isnan(optimizer.logs()["penalty"])
    (F.cross_entropy(z, y) + inner.square().sum()).backward()
    assert optimizer.logs()["penalty"] > 0


def test_in_place_edits_of_the_logits():
    results = []
    for in_place in (False, True):
        model = mlp()
        optimizer = wrap(model, companion=mlp(seed=3), loss_scale=1.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            z = z.div_(2.0) if in_place else z / 2.0
            F.cross_entropy(z, y).backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


def test_inputs_that_need_gradients_get_only_the_models():
    model, x = mlp(), torch.randn(4, FEATURES, dtype=torch.float64, requires_grad=True)
    optimizer = wrap(model, weight=0.0, companion=mlp(seed=3))
    backward(model, x, torch.arange(4))
    optimizer.step()
    (expected,) = torch.autograd.grad(F.cross_entropy(mlp()(x), torch.arange(4)), x)
    assert_same(x.grad, expected)


def test_step_without_a_training_forward_is_an_error_that_changes_nothing():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    model.eval()
    backward(model, x, y)
    before = copy.deepcopy(model.state_dict())
    message = r"DCLOptimizer.step found gradients, but no backward through a training forward.*strict=False"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(lambda: F.cross_entropy(model(x), y).backward())
    assert_same(model.state_dict(), before)
    optimizer.zero_grad()
    optimizer.step()  # nothing to step on: as in torch.optim

    for group in optimizer.param_groups:
        group["lr"] = 0.0
    backward(model, x, y)
    optimizer.step()  # a dry step, as torch.distributed.checkpoint takes


def test_strict_false_allows_unregularised_steps():
    model = mlp().eval()
    alone = copy.deepcopy(model)
    train(model, wrap(model, strict=False), batches(3))
    train(alone, sgd(alone), batches(3))
    assert_same(model, alone)


def test_penalty_reaches_the_step_whoever_calls_backward():
    """create_graph is the one backward that is not regularised, and the step says so."""
    model = mlp()
    optimizer = wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.cross_entropy(model(one()[0]), one()[1]).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:non-finite logits or loss")
def test_non_finite_values_behave_as_in_plain_torch_and_show_in_the_logs():
    model, alone = mlp(), mlp()
    optimizer, base = wrap(model), sgd(alone)
    x, y = one()
    x[0, 0] = float("nan")
    for m, o in ((model, optimizer), (alone, base)):
        backward(m, x, y)
        o.step()
    assert torch.isnan(alone[2].weight).all()
    assert torch.equal(torch.isnan(model[2].weight), torch.isnan(alone[2].weight))
    assert optimizer.penalty != optimizer.penalty
    assert optimizer.logs()["penalty"] != optimizer.logs()["penalty"]


@pytest.mark.parametrize("draws", ["as many", "more"])
def test_random_streams_are_left_as_without_the_companion(draws):
    model = dropout_net()
    companion = None if draws == "as many" else nn.Sequential(nn.Dropout(0.1), dropout_net(seed=3))
    alone = dropout_net()
    x, _ = one()
    torch.manual_seed(4)
    alone(x)
    expected = torch.get_rng_state()
    with wrap(model, companion=companion):
        torch.manual_seed(4)
        model(x)
    assert torch.equal(torch.get_rng_state(), expected)


def test_companion_replays_the_models_draws():
    model = dropout_net()
    optimizer = wrap(model)
    x, y = one()
    backward(model, x, y)
    assert optimizer.penalty == 0.0, "same weights and same masks give the same logits"


# ---- forwards that are not the script's training ones ----------------------------------------------------------------


def test_gradients_by_torch_func_are_left_alone_and_a_step_on_them_says_so():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(values):
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    found = torch.func.grad(loss)(parameters)
    model_alone = mlp()
    backward(model_alone, x, y)
    for name, parameter in model_alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]
    with pytest.raises(RuntimeError, match=r"or torch\.func took the gradient"):
        optimizer.step()


def test_functional_call_with_the_models_own_parameters_is_a_training_forward():
    model, expected = mlp(), mlp()
    optimizer = wrap(model)
    for x, y in batches(4):
        optimizer.zero_grad()
        F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
        optimizer.step()
    train(expected, wrap(expected), batches(4))
    assert_same(model, expected)


def test_a_model_that_is_frozen_for_now_adds_nothing_to_what_comes_through_it():
    """A discriminator inside its generator's loss: the generator's gradient is the plain one."""
    generator, discriminator = nn.Linear(3, FEATURES).double(), mlp()
    optimizer = wrap(discriminator)
    companion = copy.deepcopy(optimizer.companion)
    z, (_, y) = torch.randn(16, 3, dtype=torch.float64), one()
    discriminator.requires_grad_(False)
    backward(discriminator, generator(z), y)
    discriminator.requires_grad_(True)
    alone = mlp()
    expected = copy.deepcopy(generator)
    expected.zero_grad()
    backward(alone, expected(z), y)
    assert torch.equal(generator.weight.grad, expected.weight.grad)
    assert_same(optimizer.companion, companion)
    train(discriminator, optimizer, batches(1))
    assert optimizer.logs()["step"] == 1


def test_a_closure_after_a_backward_whose_step_never_came():
    model, expected = mlp(), mlp()
    optimizer, calm = wrap(model), wrap(expected)
    backward(model, *one(x_seed=9))  # a script's guard against outliers leaves this step out
    x, y = one()

    def closure(network, chosen):
        chosen.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        return loss

    optimizer.step(lambda: closure(model, optimizer))
    calm.step(lambda: closure(expected, calm))
    assert_same(model, expected)
    assert_same(optimizer.companion, calm.companion)
