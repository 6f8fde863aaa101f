"""What alpha means under optimizers that divide a factor of the gradient out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from dcl_optim.chase import ignores_gradient_scale, slowed
from tests.helpers import assert_same, batches, mlp, train

SCALE_FREE = ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]


def torchs(name, parameters):
    return getattr(torch.optim, name)(parameters, lr=0.01)


@pytest.mark.parametrize("name", [*SCALE_FREE, "SGD", "ASGD"])
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_whether_an_optimizer_ignores_the_scale_is_found_out_by_trying(name, lr):
    optimizer = torchs(name, [nn.Parameter(torch.ones(2, 2))])
    optimizer.param_groups[0]["lr"] = lr  # as during a warm-up
    assert ignores_gradient_scale(optimizer) == (name in SCALE_FREE)


@pytest.mark.parametrize("change", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.5}, {"maximize": True}])
def test_sgd_heeds_the_scale_with_all_its_options(change):
    assert not ignores_gradient_scale(torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1, **change))


def test_what_cannot_be_tried_is_left_alone():
    assert not ignores_gradient_scale(torch.optim.LBFGS([nn.Parameter(torch.ones(2, 2))]))


class Noisy(torch.optim.Adam):
    """Draws random numbers, as no optimizer of torch's does."""

    def step(self, closure=None):
        torch.rand(3)
        return super().step(closure)


def test_the_trial_leaves_random_streams_and_optimizer_alone():
    optimizer = Noisy([nn.Parameter(torch.ones(2, 2))])
    before = torch.get_rng_state()
    ignores_gradient_scale(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state


@pytest.mark.parametrize("empty", [[], [{"params": []}]])
def test_the_trial_takes_a_group_that_has_parameters(empty):
    matrix = [{"params": [nn.Parameter(torch.ones(2, 2))]}]
    assert ignores_gradient_scale(torch.optim.Adam([*empty, *matrix]))
    assert not ignores_gradient_scale(torch.optim.SGD([*empty, *matrix], lr=0.1))


def test_a_trial_that_fails_leaves_random_streams_alone():
    class Failing(Noisy):
        def step(self, closure=None):
            super().step(closure)
            raise RuntimeError("cannot be tried")

    before = torch.get_rng_state()
    assert not ignores_gradient_scale(Failing([nn.Parameter(torch.ones(2, 2))]))
    assert torch.equal(torch.get_rng_state(), before)


def companions_way(make, alpha, steps=1, **options):
    """How far the companion's weights have moved after a few steps; the first batch finds both networks equal."""
    model = mlp(seed=3)
    other = mlp(seed=4)
    start = {name: value.clone() for name, value in other.state_dict().items()}
    optimizer = DCLOptimizer(make(model.parameters()), model, alpha=alpha, companion=other, **{"weight": 1.0} | options)
    train(model, optimizer, batches(steps))
    return torch.cat([(value - start[name]).flatten() for name, value in other.state_dict().items()])


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-30, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.mark.parametrize("make", [adamw, sgd, lambda p: adamw(p, amsgrad=True)])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_the_first_step_is_1_minus_alpha_of_that_without_alpha(make, alpha):
    full = companions_way(make, 0.0)
    assert full.abs().max() > 1e-3
    torch.testing.assert_close(companions_way(make, alpha), (1 - alpha) * full, rtol=1e-9, atol=1e-15)


def test_a_given_optimizer_is_slowed_too():
    given = {"companion_optimizer": adamw}
    full = companions_way(sgd, 0.0, **given)
    torch.testing.assert_close(companions_way(sgd, 0.75, **given), 0.25 * full, rtol=1e-9, atol=1e-15)


def test_with_alpha_one_the_companion_rests():
    assert companions_way(adamw, 1.0, steps=5).abs().max() == 0


def test_a_schedule_is_followed():
    """Alpha 1 but for the third step: the companion moves there only."""
    model = mlp()
    optimizer = DCLOptimizer(adamw(model.parameters()), model, alpha=lambda step: 0.5 if step == 3 else 1.0, weight=1.0)
    moved = []
    for x, y in batches(5):
        before = [p.clone() for p in optimizer.companion.parameters()]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(p, q) for p, q in zip(before, optimizer.companion.parameters(), strict=True)))
    assert moved == [False, False, True, False, False]


def test_the_learning_rates_are_those_of_the_base_outside_the_step():
    model = mlp()
    optimizer = DCLOptimizer(adamw(model.parameters()), model, companion_lr_scale=2.0, weight=1.0)
    seen = []
    optimizer.companion_optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["lr"]))
    train(model, optimizer, batches(2))
    assert seen == [0.02 * (1 - 0.6)] * 2
    assert optimizer.companion_optimizer.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_learning_rates_come_back_to_the_bit_after_an_error(rate):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate)
    seen = []

    def step():
        with slowed(optimizer, 0.3):
            seen.append(float(optimizer.param_groups[0]["lr"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert seen == [0.1 * 0.3]
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.1


def test_without_a_learning_rate_there_is_nothing_to_slow():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with slowed(optimizer, 0.3):
        assert_same(optimizer.param_groups[0]["params"][0].detach(), torch.ones(2))


class Adapting(torch.optim.Adam):
    """Halves its own learning rate at each step, as some optimizers do in their groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] /= 2
        return super().step(closure)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_rate_that_the_optimizer_changes_itself_stays_its_own(factor):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Adapting([weight], lr=0.5)
    with slowed(optimizer, factor):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    torch.testing.assert_close(weight.detach(), torch.full((2,), 1 - 0.25 * factor))


class Setting(torch.optim.SGD):
    """Sets its own learning rate at each step, whatever it was."""

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.125
        return super().step(closure)


@pytest.mark.parametrize("make", [Adapting, Setting])
def test_at_alpha_one_a_rate_that_the_optimizer_changes_itself_comes_back_as_it_was(make):
    """Slowed to nothing, what it has become says nothing of what it would have become."""
    optimizer = make([nn.Parameter(torch.ones(2))], lr=0.5)
    with slowed(optimizer, 0.0):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
