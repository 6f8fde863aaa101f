"""What else lives in a script: averaged copies, other models and optimizers, data loaders, wrapping again."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from dcl_optim.reference import dcl_step
from tests.helpers import FEATURES, assert_same, batch_norm_net, batches, cells, dropout_net, mlp, train

METHOD = {"weight": 0.7, "alpha": 0.4}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def wrap(model, seed=None, **options):
    """Wrapped with a companion apart from the model where a seed is given, else with a copy."""
    companion = None if seed is None else mlp(seed=seed)
    return DCLOptimizer(sgd(model.parameters()), model, companion=companion, **METHOD | options)


# ---- averages of the weights ----------------------------------------------------------------------------------------


def averaged_run(variant, wrapped_first, averaging=True, **options):
    """Ten steps with an exponential average beside, whose batch norm is recalibrated in the middle and at the end."""
    model, criterion = batch_norm_net(), nn.CrossEntropyLoss()
    optimizer = sgd(model.parameters())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    if variant == "dcl":
        optimizer = DCLOptimizer(optimizer, model, **METHOD | options)
    if variant == "dcp":
        optimizer = DCPOptimizer(optimizer, model, **METHOD | options)
    if wrapped_first:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step, batch in enumerate(batches(10)):
        train(model, optimizer, [batch], criterion)
        if averaging:
            ema.update_parameters(model)
            if step in (4, 9):
                update_bn(batches(3, seed=7), ema)
                update_bn(batches(3, seed=7), copy.deepcopy(model))
    return model, optimizer, ema


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_averages_are_those_of_the_plain_run_and_disturb_nothing(variant, wrapped_first):
    plain = averaged_run("plain", wrapped_first)
    unweighted = averaged_run(variant, wrapped_first, weight=0.0)
    assert_same(unweighted[0], plain[0])
    assert_same(unweighted[2], plain[2])

    beside, alone = (averaged_run(variant, wrapped_first, averaging) for averaging in (True, False))
    assert_same(beside[0], alone[0])
    assert_same(beside[1].state_dict(), alone[1].state_dict())
    assert not torch.equal(beside[2].module[0].weight, beside[0][0].weight)


def test_recalibrating_the_wrapped_models_own_batch_norm_trains_nothing():
    model, optimizer, _ = averaged_run("dcl", True, averaging=False)
    before, figures = copy.deepcopy(optimizer.state_dict()), optimizer.logs()
    alone = copy.deepcopy(model)
    for network in (model, alone):
        update_bn(batches(3, seed=7), network)
    assert_same(model, alone)
    assert_same(optimizer.state_dict(), before)
    assert optimizer.logs() == figures


# ---- several networks -----------------------------------------------------------------------------------------------


def gan():
    """Generator and discriminator, their companions apart from them: all four small and in float64."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(3, FEATURES), nn.Linear(FEATURES, 1)) for _ in range(2)]
    return [nn.Sequential(first, nn.Tanh()).double() for first, _ in pairs] + [second.double() for _, second in pairs]


def noise(step, half):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(10 * step + half), dtype=torch.float64)


def says(discriminator, x, real):
    z = discriminator(x)
    return F.binary_cross_entropy_with_logits(z, torch.full_like(z, float(real)))


def wrapped_gan(steps, toggled):
    generator, omega_g, discriminator, omega_d = gan()
    options = METHOD | {"loss_scale": 1.0}
    g_optimizer = DCLOptimizer(sgd(generator.parameters()), generator, companion=omega_g, **{"weight": 1.0} | options)
    d_optimizer = DCLOptimizer(
        sgd(discriminator.parameters()), discriminator, companion=omega_d, **{"weight": 1.0} | options
    )
    for step, (x, _) in enumerate(batches(steps)):
        d_optimizer.zero_grad()
        fake = generator(noise(step, 0)).detach()
        (says(discriminator, x, True) + says(discriminator, fake, False)).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        discriminator.requires_grad_(not toggled)
        says(discriminator, generator(noise(step, 1)), True).backward()
        discriminator.requires_grad_(True)
        g_optimizer.step()
    return generator, omega_g, discriminator, omega_d


def chase(omega, optimizer, pairs):
    """The companion's step on the mean over the forwards, (x, z) each."""
    optimizer.zero_grad()
    for x, z in pairs:
        c = omega(x)
        (distances.mse(c, 0.4 * c.detach() + 0.6 * z.detach()) / len(pairs)).backward()
    optimizer.step()


def penalty(z, c):
    return METHOD["weight"] * distances.mse(z, c.detach())


def gan_by_hand(steps, toggled):
    """Algorithm 1 for each network at its own step. The generator's step trains nothing of the discriminator.

    Untoggled, as DCGAN's script has it, the discriminator's penalty is part of what the generator is led by: nothing
    tells that forward from one that trains the discriminator.
    """
    networks = generator, omega_g, discriminator, omega_d = gan()
    g_step, g_chase, d_step, d_chase = (sgd(network.parameters()) for network in networks)
    for step, (x, _) in enumerate(batches(steps)):
        fake = generator(noise(step, 0)).detach()
        pairs = [(inputs, discriminator(inputs)) for inputs in (x, fake)]
        loss = says(discriminator, x, True) + says(discriminator, fake, False)
        d_step.zero_grad()
        (loss + sum(penalty(z, omega_d(inputs)) for inputs, z in pairs)).backward()
        d_step.step()
        chase(omega_d, d_chase, pairs)

        made = generator(noise(step, 1))
        loss = says(discriminator, made, True) + penalty(made, omega_g(noise(step, 1)))
        if not toggled:
            loss = loss + penalty(discriminator(made), omega_d(made.detach()))
        g_step.zero_grad()
        loss.backward()
        g_step.step()
        chase(omega_g, g_chase, [(noise(step, 1), made)])
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
    optimizers = [wrap(model, seed=3 + i) for i, model in enumerate(models)]
    for batch in batches(8):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, [batch])
    for seed in (0, 1):
        alone = mlp(seed=seed)
        optimizer = wrap(alone, seed=3 + seed)
        train(alone, optimizer, batches(8))
        assert_same(models[seed], alone)
        assert_same(optimizers[seed].state_dict(), optimizer.state_dict())


# ---- one network, wrapped more than once ----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["detach", "context manager", "wrapping again"])
def test_wrapped_again_starts_with_a_new_companion_and_the_same_base(by):
    model, theirs = mlp(), mlp()
    base, plain = sgd(model.parameters()), sgd(theirs.parameters())
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

    for part, regularised in ((data[:5], True), (data[5:10], False), (data[10:], True)):
        companion = copy.deepcopy(theirs)
        chasing = sgd(companion.parameters())
        for x, y in part:
            if regularised:
                dcl_step(theirs, companion, plain, chasing, x, y, F.cross_entropy, distances.mse, **METHOD)
            elif by != "wrapping again":
                train(theirs, plain, [(x, y)])
    assert_same(model, theirs, **CLOSE)
    assert_same(again.companion, companion, **CLOSE)


def test_the_context_manager_leaves_the_model_as_it_was_after_an_exception():
    model = mlp()
    optimizer = wrap(model)

    def interrupted():
        with optimizer as same:
            assert same is optimizer
            F.cross_entropy(model(next(batches(1))[0]), next(batches(1))[1]).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    alone = mlp()
    train(model, optimizer, batches(3))
    train(alone, sgd(alone.parameters()), batches(3))
    assert_same(model, alone)


def test_a_replaced_optimizer_says_so_and_has_stepped_nothing():
    model = mlp()
    first, second = wrap(model, seed=3), wrap(model, seed=4)
    x, y = next(batches(1))
    F.cross_entropy(model(x), y).backward()
    before = copy.deepcopy([model.state_dict(), first.companion.state_dict()])
    with pytest.raises(RuntimeError, match="another optimizer has wrapped the model since"):
        first.step()
    assert_same([model.state_dict(), first.companion.state_dict()], before)
    second.step()
    once = mlp()
    train(once, wrap(once, seed=4), [(x, y)])
    assert_same(model, once)


def test_two_optimizers_over_one_model():
    """Both get the regularised gradient; the companion learns what the wrapped one trains, the rest stays as it was."""
    model, theirs, omega = mlp(), mlp(), mlp(seed=3)
    body = DCLOptimizer(sgd(model[0].parameters()), model, companion=mlp(seed=3), **METHOD)
    head = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    for x, y in batches(8):
        body.zero_grad()
        head.zero_grad()
        F.cross_entropy(model(x), y).backward()
        head.step()
        body.step()

    their_body, their_head = sgd(theirs[0].parameters()), torch.optim.AdamW(theirs[2].parameters(), lr=1e-2)
    chasing = sgd(omega[0].parameters())
    for x, y in batches(8):
        z = theirs(x)
        theirs.zero_grad()
        (F.cross_entropy(z, y) + penalty(z, omega(x))).backward()
        their_head.step()
        their_body.step()
        chase(omega, chasing, [(x, z)])
    assert_same(model, theirs, **CLOSE)
    assert_same(body.companion, omega, **CLOSE)
    assert_same(body.companion[2], mlp(seed=3)[2])


# ---- data loaders ---------------------------------------------------------------------------------------------------


def loaded_run(variant, epochs, **options):
    torch.manual_seed(2)
    model, criterion = dropout_net(), nn.CrossEntropyLoss()
    if variant == "dcl":
        optimizer = DCLOptimizer(sgd(model.parameters()), model, **METHOD)
    else:
        optimizer = DCPOptimizer(sgd(model.parameters()), model, **{"weight": 1.0, "alpha": 0.6} | METHOD)
    x, y = next(batches(1, size=60))
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True, **options)
    for _ in range(epochs):
        train(model, optimizer, loader, criterion)
    return [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()]


@pytest.mark.parametrize("start", cells(["fork", "spawn"], "fork"))
def test_workers_that_load_the_data_change_nothing(start):
    options = {"num_workers": 2, "multiprocessing_context": start}
    for variant, epochs in (("dcl", 2), ("dcp", 2)) if start == "fork" else (("dcl", 1),):  # spawning takes seconds
        assert_same(loaded_run(variant, epochs, **options), loaded_run(variant, epochs))
