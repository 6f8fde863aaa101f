"""The step, with a closure and without, the errors that it raises, and several optimizers in one script."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer, distances, reference
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    backward,
    batches,
    mlp,
    one,
    sgd,
    train,
    wrap,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-12}

# ---- the step --------------------------------------------------------------------------------------------------------


def test_step_returns_the_loss_without_the_penalty():
    model = mlp()
    optimizer = wrap(model, companion=mlp(seed=3), weight=10.0)
    x, y = one()
    expected = F.cross_entropy(mlp()(x), y).item()
    assert optimizer.step(lambda: F.cross_entropy(model(x), y)).item() == pytest.approx(expected, abs=1e-12)


def test_a_closure_with_a_graph_of_its_gradients_keeps_it():
    def run(wrapped):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrapped:
            optimizer = DCLOptimizer(optimizer, model, weight=0.0, strict=False)
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


def test_logs():
    model = mlp()
    optimizer = wrap(model, weight=lambda t: 0.1 * t, alpha=0.25, companion=mlp(seed=3))
    before = optimizer.logs()
    assert before.pop("step") == 0.0
    assert list(before) == ["penalty", "weight", "alpha", "loss_scale"]
    assert all(map(math.isnan, before.values()))
    x, y = one()
    expected = F.mse_loss(model(x), optimizer.companion(x)).item()
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()
    logs = optimizer.logs()
    assert logs["penalty"] == pytest.approx(expected, abs=1e-12)
    assert (logs["step"], logs["weight"], logs["alpha"]) == (1.0, 0.1, 0.25)
    assert optimizer.logs(prefix="dcl/") == {f"dcl/{name}": value for name, value in logs.items()}
    assert logs["loss_scale"] == pytest.approx(1.0)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_an_empty_first_group(variant):
    def run(groups):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES).double()
        base = torch.optim.SGD([*groups, {"params": model.parameters()}], lr=0.1)
        optimizer = (DCLOptimizer if variant == "dcl" else DCPOptimizer)(base, model)
        train(model, optimizer, batches(3))
        return model.state_dict()

    assert_same(run([{"params": [], "weight_decay": 0.5}]), run([]))


# ---- steps that are refused ------------------------------------------------------------------------------------------


def test_step_without_a_training_forward_is_an_error_that_changes_nothing():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    model.eval()
    backward(model, x, y)
    before = copy.deepcopy(model.state_dict())
    message = r"(?s)DCLOptimizer.step found gradients, but no backward through a training forward.*strict=False"
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


def test_strict_false_allows_unregularized_steps():
    model = mlp().eval()
    alone = copy.deepcopy(model)
    train(model, wrap(model, strict=False), batches(3))
    train(alone, sgd(alone), batches(3))
    assert_same(model, alone)


def test_a_step_after_a_backward_with_create_graph_is_refused():
    model = mlp()
    optimizer = wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.cross_entropy(model(one()[0]), one()[1]).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        optimizer.step()


@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
def test_stepping_twice_names_its_cause(kind):
    model = mlp()
    optimizer = kind(sgd(model), model)
    train(model, optimizer, batches(1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(RuntimeError, match=r"(?s)step found gradients.*or the gradients are those of the last step"):
        optimizer.step()
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    train(model, optimizer, batches(1))
    model.eval()
    optimizer.zero_grad()
    backward(model, *one())
    with pytest.raises(RuntimeError, match=r"(?s)step found gradients.*the model is in eval mode"):
        optimizer.step()


# ---- buffers that the script refills before the step -----------------------------------------------------------------


def test_inputs_that_are_refilled_before_the_step_are_learned_from_as_they_were():
    """The companion's backward runs when the model's has ended. Autograd does not notice what numpy writes."""
    model, hand, companion = mlp(), mlp(), mlp()
    optimizer, base, second = wrap(model), sgd(hand), sgd(companion)
    buffer = np.empty((8, FEATURES))
    for x, y in batches(5):
        optimizer.zero_grad()
        for rows, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            buffer[:] = rows.numpy()
            (F.cross_entropy(model(torch.from_numpy(buffer)), labels) / 2).backward()
            buffer[:] = 100.0
        optimizer.step()
        reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, distances.mse)
    assert_same(model, hand, **CLOSE)
    assert_same(optimizer.companion, companion, **CLOSE)


# ---- several networks ------------------------------------------------------------------------------------------------


METHOD = {"weight": 0.7, "alpha": 0.4}


def gan():
    """A generator, its companion, a discriminator and its companion: four starts, in float64."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(3, FEATURES), nn.Linear(FEATURES, 1)) for _ in range(2)]
    return [nn.Sequential(first, nn.Tanh()).double() for first, _ in pairs] + [second.double() for _, second in pairs]


def noise(step, half):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(10 * step + half), dtype=torch.float64)


def says(z, real):
    return F.binary_cross_entropy_with_logits(z, torch.full_like(z, float(real)))


def wrapped_gan(steps, toggled):
    generator, omega_g, discriminator, omega_d = gan()
    g_optimizer = DCLOptimizer(sgd(generator, lr=0.05), generator, companion=omega_g, **METHOD)
    d_optimizer = DCLOptimizer(sgd(discriminator, lr=0.05), discriminator, companion=omega_d, **METHOD)
    for step, (x, _) in enumerate(batches(steps)):
        d_optimizer.zero_grad()
        fake = generator(noise(step, 0)).detach()
        true, false = discriminator(x), discriminator(fake)
        loss = says(true, True) + says(false, False)
        (loss + d_optimizer.penalty(true) + d_optimizer.penalty(false)).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        discriminator.requires_grad_(not toggled)
        made = generator(noise(step, 1))
        (says(discriminator(made), True) + g_optimizer.penalty(made)).backward()
        discriminator.requires_grad_(True)
        g_optimizer.step()
    return generator, omega_g, discriminator, omega_d


def learn(omega, optimizer, pairs):
    """The companion's step on the mean over forward passes, (x, z) each."""
    optimizer.zero_grad()
    for x, z in pairs:
        c = omega(x)
        (distances.mse(c, 0.4 * c.detach() + 0.6 * z.detach()).mean() / len(pairs)).backward()
    optimizer.step()


def penalty(z, c):
    return METHOD["weight"] * distances.mse(z, c.detach()).mean()


def gan_by_hand(steps, toggled):
    """Algorithm 1 for each network at its own step. The generator's step trains nothing of the discriminator.

    Untoggled, as DCGAN's script has it, the discriminator's penalty is part of what the generator is led by: nothing
    tells that forward from one that trains the discriminator.
    """
    networks = generator, omega_g, discriminator, omega_d = gan()
    g_step, g_second, d_step, d_second = (sgd(network, lr=0.05) for network in networks)
    for step, (x, _) in enumerate(batches(steps)):
        fake = generator(noise(step, 0)).detach()
        pairs = [(inputs, discriminator(inputs)) for inputs in (x, fake)]
        loss = says(discriminator(x), True) + says(discriminator(fake), False)
        d_step.zero_grad()
        (loss + sum(penalty(z, omega_d(inputs)) for inputs, z in pairs)).backward()
        d_step.step()
        learn(omega_d, d_second, pairs)

        made = generator(noise(step, 1))
        loss = says(discriminator(made), True) + penalty(made, omega_g(noise(step, 1)))
        if not toggled:
            loss = loss + penalty(discriminator(made), omega_d(made.detach()))
        g_step.zero_grad()
        loss.backward()
        g_step.step()
        learn(omega_g, g_second, [(noise(step, 1), made)])
    return networks


@pytest.mark.parametrize("toggled", [True, False])
def test_generator_and_discriminator_both_wrapped(toggled):
    for found, expected in zip(wrapped_gan(12, toggled), gan_by_hand(12, toggled), strict=True):
        assert_same(found, expected, **CLOSE)
    assert_different(gan_by_hand(12, True)[0], gan_by_hand(12, False)[0])


def assert_different(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert max((p - q).detach().abs().max() for p, q in pairs) > 1e-4


def test_two_models_trained_in_turns_are_two_runs():
    models = [mlp(seed=seed) for seed in (0, 1)]
    optimizers = [wrap(model, companion=mlp(seed=3 + i)) for i, model in enumerate(models)]
    for batch in batches(8):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, [batch])
    for seed in (0, 1):
        alone = mlp(seed=seed)
        optimizer = wrap(alone, companion=mlp(seed=3 + seed))
        train(alone, optimizer, batches(8))
        assert_same(models[seed], alone)
        assert_same(optimizers[seed].state_dict(), optimizer.state_dict())


# ---- one network, wrapped more than once -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["detach", "context manager", "wrapping again"])
def test_wrapped_again_starts_with_a_new_companion_and_the_same_base(by):
    model, theirs = mlp(), mlp()
    base, plain = sgd(model), sgd(theirs)
    data = list(batches(15))
    optimizer = DCLOptimizer(base, model, **METHOD)
    if by == "context manager":
        with optimizer:
            train(model, optimizer, data[:5])
    else:
        train(model, optimizer, data[:5])
    if by == "detach":
        optimizer.detach()
    if by != "wrapping again":
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        train(model, optimizer, data[5:10])
    again = DCLOptimizer(base, model, **METHOD)
    train(model, again, data[10:])

    for part, regularized in ((data[:5], True), (data[5:10], False), (data[10:], True)):
        companion = copy.deepcopy(theirs)
        second = sgd(companion)
        for x, y in part:
            if regularized:
                reference.dcl_step(theirs, companion, plain, second, x, y, F.cross_entropy, distances.mse, **METHOD)
            elif by != "wrapping again":
                train(theirs, plain, [(x, y)])
    assert_same(model, theirs, **CLOSE)
    assert_same(again.companion, companion, **CLOSE)


def test_two_optimizers_over_one_model():
    """Both get the regularized gradient; the companion learns what the wrapped one trains, the rest stays as it was."""
    model, theirs, omega = mlp(), mlp(), mlp(seed=3)
    body = DCLOptimizer(sgd(model[0]), model, companion=mlp(seed=3), **METHOD)
    head = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    for x, y in batches(8):
        body.zero_grad()
        head.zero_grad()
        F.cross_entropy(model(x), y).backward()
        head.step()
        body.step()

    their_body, their_head = sgd(theirs[0]), torch.optim.AdamW(theirs[2].parameters(), lr=1e-2)
    second = sgd(omega[0])
    for x, y in batches(8):
        z = theirs(x)
        theirs.zero_grad()
        (F.cross_entropy(z, y) + penalty(z, omega(x))).backward()
        their_head.step()
        their_body.step()
        learn(omega, second, [(x, z)])
    assert_same(model, theirs, **CLOSE)
    assert_same(body.companion, omega, **CLOSE)
    assert_same(body.companion[2], mlp(seed=3)[2])
