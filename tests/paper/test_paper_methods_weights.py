"""Methods of the paper's experiments that perturb or average weights or average networks, against their formulas."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from examples.paper.methods import Setting
from tests.paper.test_paper_methods import BATCH, FEATURES, SAMPLES, STEPS, advance, assert_close, batches, started
from tests.paper.test_paper_methods_formulas import (
    DECAY,
    RATE,
    apply,
    by_hand,
    cross_entropy,
    descend,
    normed,
    probabilities,
    rate,
    twin,
)

# ---- perturbed weights -----------------------------------------------------------------------------------------------


class Flat:
    """The loss's gradient as one vector, at any weights; batch norm normalises by the batch."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        self.net, self.x, self.y = copy.deepcopy(net), x, y

    def __call__(self, weights: Tensor) -> Tensor:
        weights = weights.detach().requires_grad_()
        named, start = {}, 0
        for name, parameter in self.net.named_parameters():
            named[name] = weights[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        (gradient,) = torch.autograd.grad(cross_entropy(functional_call(self.net, named, (self.x,)), self.y), weights)
        return gradient


def step_flat(net: nn.Module, x: Tensor, gradient: Tensor, epoch: int) -> None:
    net(x)  # batch norm's statistics see the batch once, at the unperturbed weights
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    torch.nn.utils.vector_to_parameters(weights - rate(epoch) * (gradient + DECAY * weights), net.parameters())


def weights_of(net: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def test_sam_descends_with_the_gradient_at_the_ascended_weights() -> None:
    method = started("sam", by_hand(normed), rho=0.3)
    net = twin(method)
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        gradient, here = Flat(net, x, y), weights_of(net)
        step_flat(net, x, gradient(here + 0.3 * unit(gradient(here))), epoch)
    assert_close(method.networks()["model"], net, 1e-7)  # pytorch_optimizer takes the norm in float32


def test_gam_combines_its_four_gradients() -> None:
    method = started("gam", by_hand(normed), rho=0.4, rho_gradient=0.1, beta_0=0.3, beta_1=0.7, gamma=0.2)
    net = twin(method)
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        gradient, here = Flat(net, x, y), weights_of(net)
        g_0 = gradient(here)
        g_1 = gradient(here + 0.1 * unit(g_0))
        there = here + 0.4 * unit(g_1 - g_0)
        g_2 = gradient(there)
        g_3 = gradient(there + 0.1 * unit(g_2))
        h, v = 0.7 * g_1 + 0.3 * g_3, 0.3 * g_0 + 0.7 * g_2
        orthogonal = v - (v @ unit(h)) * unit(h)
        step_flat(net, x, h - 0.2 * orthogonal, epoch)
    assert_close(method.networks()["model"], net, 1e-10)


# ---- averages of the weights -----------------------------------------------------------------------------------------


def with_integers() -> nn.Module:
    net = normed()
    net.register_buffer("positions", torch.arange(50))
    return net


def test_the_weight_average_weighs_each_step_by_the_decay() -> None:
    method = started("ema", by_hand(with_integers), decay=0.9)
    plain = started("plain", by_hand(with_integers))
    seen: list[dict[str, Tensor]] = []
    for batch in batches():
        advance(method, batch)
        advance(plain, batch)
        seen.append(copy.deepcopy(plain.networks()["model"].state_dict()))
    last = len(seen) - 1
    weights = [0.9**last] + [0.1 * 0.9 ** (last - n) for n in range(1, last + 1)]
    average = method.networks()["average"].state_dict()
    for name, value in average.items():
        if value.is_floating_point():
            expected = sum(weight * state[name] for weight, state in zip(weights, seen, strict=True))
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
        else:
            assert torch.equal(value, seen[-1][name])
    x = next(batches())[2]
    assert torch.equal(method.predict(x), method.predictors()["average"](x))
    assert not torch.equal(method.predict(x), method.predictors()["model"](x))


def test_the_weight_average_warms_up_as_the_plain_mean() -> None:
    method = started("ema", by_hand(normed), decay=0.999, warm_up=True)
    total, count = 0.0, 0
    for batch in batches():
        advance(method, batch)
        total, count = total + weights_of(method.networks()["model"]), count + 1
    torch.testing.assert_close(weights_of(method.networks()["average"]), total / count, rtol=0, atol=1e-12)


def test_mean_teacher_is_consistent_with_the_average_of_its_weights() -> None:
    method = started("mean-teacher", by_hand(normed), weight=20.0, ramp_up=2, decay=0.8)
    net, teacher = twin(method), twin(method, "teacher")
    for count, batch in enumerate(batches()):
        epoch, _, x, y, _ = batch
        advance(method, batch)
        weight = 20 * math.exp(-5 * (1 - min(1, epoch / 2)) ** 2)
        z, c = net(x), copy.deepcopy(teacher)(x).detach()
        descend(net, cross_entropy(z, y) + weight * (probabilities(z) - probabilities(c)).square().mean(), epoch)
        kept = min(0.8, count / (count + 1))
        state = net.state_dict()
        for name, value in teacher.state_dict().items():
            value.copy_(kept * value + (1 - kept) * state[name] if value.is_floating_point() else state[name])
    assert_close(method.networks()["model"], net)
    assert_close(method.networks()["teacher"], teacher)
    assert list(method.predictors()) == ["teacher", "model"]


# ---- ensembles -------------------------------------------------------------------------------------------------------


def mean_of(nets: list[nn.Module], x: Tensor) -> Tensor:
    return (sum(probabilities(copy.deepcopy(net).eval()(x)) for net in nets) / len(nets)).log().detach()


def test_voting_trains_each_network_alone_and_averages_their_probabilities() -> None:
    method = started("voting", by_hand(normed), estimators=3)
    nets = [twin(method, name) for name in ("model", "model_2", "model_3")]
    assert len({net[0].weight.sum().item() for net in nets}) == 3
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        for net in nets:
            descend(net, cross_entropy(net(x), y), epoch)
    for name, net in zip(("model", "model_2", "model_3"), nets, strict=True):
        assert_close(method.networks()[name], net)
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    torch.testing.assert_close(method.predict(x), mean_of(nets, x), rtol=0, atol=1e-12)


def test_bagging_trains_each_network_on_the_rows_of_its_resample() -> None:
    method = started("bagging", by_hand(), estimators=2)
    counts = method.kept["resample"].get_buffer("counts").clone()
    assert counts.sum(1).tolist() == [SAMPLES, SAMPLES]
    assert not torch.equal(counts[0], counts[1])
    nets = [twin(method), twin(method, "model_2")]
    for batch in batches():
        epoch, _, x, y, index = batch
        advance(method, batch)
        for net, count in zip(nets, counts, strict=True):
            rows = torch.arange(BATCH).repeat_interleave(count[index])
            descend(net, len(rows) / BATCH * cross_entropy(net(x[rows]), y[rows]), epoch)
    assert_close(method.networks()["model"], nets[0])
    assert_close(method.networks()["model_2"], nets[1])


def test_a_bootstrap_resample_leaves_out_about_a_third() -> None:
    given = by_hand()
    many = Setting(**{**vars(given), "samples": 20_000})
    counts = started("bagging", many, estimators=1).kept["resample"].get_buffer("counts")
    for number in range(4):  # the counts are Poisson(1) in the limit
        share = (counts == number).double().mean().item()
        assert share == pytest.approx(math.exp(-1) / math.factorial(number), abs=0.01)


@pytest.mark.parametrize(("estimators", "ends"), [(2, [2, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4])])
def test_snapshots_are_taken_where_the_cosine_ends(estimators: int, ends: list[int]) -> None:
    method = started("snapshot", by_hand(normed), estimators=estimators)
    net, taken = twin(method), []
    x_test = torch.randn(7, FEATURES, dtype=torch.float64)
    for batch in batches():
        epoch, step, x, y, _ = batch
        advance(method, batch)
        start, end = max([0, *(e for e in ends if e <= epoch)]), min(e for e in ends if e > epoch)
        passed = ((epoch - start) * STEPS + step) / ((end - start) * STEPS)
        loss = cross_entropy(net(x), y)
        apply(net, torch.autograd.grad(loss, list(net.parameters())), RATE / 2 * (math.cos(math.pi * passed) + 1))
        if step == STEPS - 1 and epoch + 1 in ends:
            taken.append(copy.deepcopy(net))
        torch.testing.assert_close(method.predict(x_test), mean_of(taken or [net], x_test), rtol=0, atol=1e-12)
    assert len(taken) == estimators
    assert_close(method.networks()["model"], net)
