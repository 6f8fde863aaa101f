"""The gradient of the logits: which backward passes carry the penalty, how often, and which are left alone."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import (
    FEATURES,
    assert_same,
    backward,
    batch_norm_net,
    batches,
    dropout_net,
    fit,
    mlp,
    one,
)
from tests.reference import CLOSE, EACH, NEAR, WEIGHT, assert_same_training, loss_of, term_of, wrap


def model_and_other_companion():
    """A model and a companion that differ, so that the first batch has a penalty."""
    model = mlp()
    return model, wrap("dcl", model, companion=mlp(seed=1))


# ---- forward passes that are left alone ------------------------------------------------------------------------------


def test_evaluation_is_left_alone():
    model = batch_norm_net()
    optimizer = wrap("dcl", model)
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


def test_gradients_inside_the_loss_are_left_alone():
    """A gradient penalty asks for d loss / d x with create_graph; only the outer backward is regularized."""
    model, optimizer = model_and_other_companion()
    x, y = one()
    x.requires_grad_()
    z = model(x)
    (inner,) = torch.autograd.grad(F.cross_entropy(z, y), x, create_graph=True)
    plain = mlp()
    z_plain = plain(x)
    (expected,) = torch.autograd.grad(F.cross_entropy(z_plain, y), x, create_graph=True)
    assert_same(inner.detach(), expected.detach(), **CLOSE)
    assert math.isnan(optimizer.logs()["penalty"])
    (F.cross_entropy(z, y) + inner.square().sum() + optimizer.penalty(z)).backward()
    assert optimizer.logs()["penalty"] > 0
    c = mlp(seed=1)(x).detach()
    (F.cross_entropy(z_plain, y) + expected.square().sum() + WEIGHT * F.mse_loss(z_plain, c)).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], **NEAR)


@pytest.mark.guard
def test_gradients_by_torch_func_are_left_alone_and_a_step_on_them_says_so():
    model = mlp()
    optimizer = wrap("dcl", model)
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
    with pytest.raises(RuntimeError, match="no training forward pass of the model"):
        optimizer.step()


def test_a_model_that_is_frozen_for_now_adds_nothing_to_what_comes_through_it():
    """A discriminator inside its generator's loss: the generator's gradient is the plain one."""
    generator, discriminator = nn.Linear(3, FEATURES).double(), mlp()
    optimizer = wrap("dcl", discriminator)
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
    fit(optimizer, batches(1))
    assert optimizer.logs()["step"] == 1


def test_in_place_edits_of_the_logits_do_not_reach_what_is_kept():
    results = []
    for in_place in (False, True):
        model = mlp()
        optimizer = wrap("dcl", model, companion=mlp(seed=3))
        add = Tensor.add_ if in_place else Tensor.add  # of 1, which the probabilities do not show
        fit(optimizer, batches(4), lambda z, y, add=add: F.cross_entropy(add(z, 1.0), y))
        results.append(optimizer)
    assert_same_training(*results)


@pytest.mark.guard
def test_logits_that_were_edited_in_place_are_not_those_that_the_model_returned():
    model = mlp()
    optimizer = wrap("dcl", model)
    z = model(one()[0]).div_(2.0)
    with pytest.raises(ValueError, match="pass the tensor that the model returned"):
        optimizer.penalty(z)


@EACH
def test_a_backward_after_detach_has_no_penalty(variant):
    model = mlp()
    optimizer = wrap(variant, model)
    fit(optimizer, batches(2))
    alone = copy.deepcopy(model)
    loss = F.cross_entropy(model(one()[0]), one()[1])
    optimizer.detach()
    for network in (model, alone):
        network.zero_grad()
    loss.backward()
    backward(alone, *one())
    assert_same([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


# ---- gradients that the script asks for ------------------------------------------------------------------------------


def asks_for_the_head(loss, z, model, optimizer):
    torch.autograd.grad(loss, model[-1].weight, retain_graph=True)


def asks_for_logits(loss, z, model, optimizer):
    torch.autograd.grad(7 * loss, z, retain_graph=True)


def asks_twice(loss, z, model, optimizer):
    asks_for_logits(loss, z, model, optimizer)
    asks_for_the_head(loss, z, model, optimizer)


def clears_after_asking(loss, z, model, optimizer):
    asks_for_the_head(loss, z, model, optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("build", "variant", "way", "ask"),
    [
        (mlp, "dcl", "line", asks_for_the_head),
        (dropout_net, "dcl", "line", asks_twice),
        (mlp, "dcl", "line", asks_for_logits),
        (dropout_net, "dcl", "term", clears_after_asking),
        (mlp, "dcp", "line", clears_after_asking),
        (dropout_net, "dcp", "term", asks_twice),
    ],
)
def test_training_is_the_same_whether_or_not_gradients_were_asked_for_before(build, variant, way, ask):
    found = []
    for asks in (True, False):
        model = build()
        optimizer = wrap(variant, model)
        for x, y in batches(6):
            optimizer.zero_grad()
            z = model(x)
            loss = 3 * (F.cross_entropy(z, y) + term_of(optimizer, way)(z, y))
            if asks:
                ask(loss, z, model, optimizer)
            loss.backward()
            optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict(), optimizer.logs()))
    assert_same(*found)
    assert optimizer.logs()["penalty"] > 0


# ---- gradients that reach no parameter: attacks ----------------------------------------------------------------------


def by_grad(loss, x):
    return torch.autograd.grad(loss, x)[0]


def by_inputs(loss, x):
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


def by_frozen(loss, x):
    loss.backward()
    assert x.grad is not None
    return x.grad


def attacked(model, x, y, how, steps=2):
    """Projected gradient descent on the inputs, through the model as it trains."""
    trained, batch = [p for p in model.parameters() if p.requires_grad], x
    for _ in range(steps):
        batch = batch.detach().clone().requires_grad_()
        for parameter in trained:
            parameter.requires_grad_(how is not by_frozen)
        gradient = how(F.cross_entropy(model(batch), y), batch)
        for parameter in trained:
            parameter.requires_grad_()
        batch = batch + 0.1 * gradient.sign() + 0.01 * gradient
    return batch.detach()


@pytest.mark.parametrize(
    ("variant", "way", "when", "how"),
    [
        ("dcl", "line", "before", by_grad),
        ("dcl", "line", "between", by_inputs),
        ("dcl", "line", "after", by_frozen),
        ("dcl", "term", "between", by_grad),
        ("dcp", "line", "before", by_inputs),
        ("dcp", "line", "between", by_frozen),
        ("dcp", "line", "after", by_grad),
    ],
)
def test_an_attack_sees_the_scripts_loss_and_is_not_learned_from(variant, way, when, how):
    """Bit for bit as if a copy of the model, which has no penalty, had been attacked."""
    found = []
    for on_model in (True, False):
        model = mlp()
        optimizer = wrap(variant, model)
        for x, y in batches(4):

            def attack(x=x, y=y):
                return attacked(model if on_model else copy.deepcopy(model), x, y, how)  # noqa: B023

            def learn(x, y=y):
                loss_of(optimizer, x, y, way).backward()  # noqa: B023

            optimizer.zero_grad()
            if when == "before":
                learn(attack())
            else:
                learn(x)
                adversarial = attack()
                if when == "between":
                    learn(adversarial)
            optimizer.step()
        assert optimizer.logs()["penalty"] > 0
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def adversarial_direction(model, x, how):
    """That of virtual adversarial training, by a divergence that the line cannot read."""
    model.train(how != "in evaluation mode")
    clean = F.softmax(model(x).detach(), 1)
    d = (1e-2 * torch.sin(torch.arange(x.numel(), dtype=x.dtype))).view_as(x).requires_grad_()
    divergence = F.kl_div(F.log_softmax(model(x + d), 1), clean, reduction="batchmean")
    if how == "by autograd.grad":
        return torch.autograd.grad(divergence, d)[0]
    divergence.backward()
    model.zero_grad()
    model.train()
    assert d.grad is not None
    return d.grad


@pytest.mark.guard
@EACH
def test_an_attack_by_backward_that_cannot_be_read_is_refused_and_two_ways_work(variant):
    found = []
    for how in ("by autograd.grad", "in evaluation mode", "by backward"):
        model = mlp()
        optimizer = wrap(variant, model)
        with pytest.raises(RuntimeError, match="cannot read") if how == "by backward" else nullcontext():
            for x, y in batches(3):
                fit(optimizer, [(x + adversarial_direction(model, x, how), y)])
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(found[0], found[1])


# ---- logits that were converted --------------------------------------------------------------------------------------


class Converting(nn.Module):
    """Returns logits of another dtype than its body computes, and the loss that it took before, where it gets labels.

    So do models under accelerate's mixed precision: bfloat16 inside, ``.float()`` at the end.
    """

    def __init__(self, inside, outside, seed=0):
        super().__init__()
        self.body, self._outside = mlp(seed, dtype=inside), outside

    def forward(self, x, labels=None):
        logits = self.body(x)
        found = {"logits": logits.to(self._outside)}
        return found if labels is None else found | {"loss": F.cross_entropy(logits, labels)}


def by_converted(optimizer, model, x, y):
    return F.cross_entropy(model(x)["logits"], y)


def by_the_model(optimizer, model, x, y):
    return model(x, labels=y)["loss"]


def with_the_term(optimizer, model, x, y):
    output = model(x, labels=y)
    return output["loss"] + term_of(optimizer)(output["logits"], y)


@pytest.mark.parametrize("loss", [by_converted, by_the_model, with_the_term])
@pytest.mark.parametrize(
    ("inside", "outside", "tolerance"),
    [(torch.float32, torch.float64, 1e-5), (torch.bfloat16, torch.float32, 3e-2)],
    ids=["float32 to float64", "bfloat16 to float32"],
)
@EACH
def test_a_gradient_query_and_the_backward_after_it_each_have_the_penalty_once(
    variant, inside, outside, tolerance, loss
):
    model = Converting(inside, outside)
    parameters, (first, second) = [*model.parameters()], batches(2, dtype=inside)
    if variant == "dcl":
        companion = Converting(inside, outside, seed=3)
        optimizer = wrap("dcl", model, companion=companion)
    else:
        optimizer = wrap("dcp", model)
        loss(optimizer, model, *first).backward()  # the prototypes are this batch's class means then
        optimizer.step()
        optimizer.zero_grad()
    x, y = second
    with torch.no_grad():
        c = companion(x)["logits"] if variant == "dcl" else optimizer.prototypes[y].to(outside)
    alone = copy.deepcopy(model.body)
    z = alone(x)
    (F.cross_entropy(z, y) + WEIGHT * F.mse_loss(z.to(outside), c)).backward()

    value = loss(optimizer, model, x, y)
    asked = torch.autograd.grad(value, parameters, retain_graph=True)
    value.backward()
    for expected, query, parameter in zip(alone.parameters(), asked, parameters, strict=True):
        scale = float(expected.grad.abs().max())
        torch.testing.assert_close(query, expected.grad, rtol=0.0, atol=tolerance * scale)
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0.0, atol=tolerance * scale)
