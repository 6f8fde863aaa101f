"""Each method of the paper's experiments against its formula written out by hand, in float64 over whole epochs."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from examples.research.methods import METHODS, Method, Setting, make
from examples.research.methods.averages import moving_average
from examples.research.tests.test_methods import (
    CLASSES,
    EPOCHS,
    FEATURES,
    SAMPLES,
    STEPS,
    advance,
    assert_close,
    batches,
    network,
    setting,
    started,
)

DECAY, RATE = 1e-2, 0.2
smooth = functools.partial(network, batch_norm=False, dropout=0.0)
normed = functools.partial(network, dropout=0.0)


def by_hand(build: Callable[[], nn.Module] = smooth) -> Setting:
    """Without momentum, so that a step is written in one line."""
    return setting(build, momentum=0.0)


def rate(epoch: int) -> float:
    return RATE / 2 * (1 + math.cos(math.pi * epoch / EPOCHS))


def descend(net: nn.Module, loss: Tensor, epoch: int) -> None:
    """One step of gradient descent with weight decay."""
    parameters = list(net.parameters())
    apply(net, torch.autograd.grad(loss, parameters), rate(epoch))


def apply(net: nn.Module, gradients: Any, learning_rate: float) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= learning_rate * (gradient + DECAY * parameter)


def probabilities(logits: Tensor) -> Tensor:
    exponentials = logits.exp()
    return exponentials / exponentials.sum(1, keepdim=True)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Of labels or of target distributions."""
    if target.dim() == 1:
        target = torch.eye(CLASSES, dtype=logits.dtype)[target]
    return -(target * probabilities(logits).log()).sum(1).mean()


def twin(method: Method, name: str = "model") -> nn.Module:
    return copy.deepcopy(method.networks()[name]).train()


DEFAULTS = {
    "plain": {"label_smoothing": 0.0},
    "dcl": {"weight": 0.1, "alpha": 0.99, "distance": "mse"},
    "dcp": {"weight": "auto", "alpha": 0.97, "distance": "mse", "update": "rows"},
    "cs-kd": {"weight": 1.0, "temperature": 4.0},
    "gam": {"rho": 0.2, "rho_gradient": 0.02, "beta_0": 0.5, "beta_1": 0.6, "gamma": 0.03},
    "saf": {"weight": 0.3, "temperature": 5.0, "lag": 3, "start": 5},
    "dml": {"weight": 1.0},
    "ps-kd": {"alpha": 0.8},
    "mean-teacher": {"weight": 100.0, "ramp_up": 5, "decay": 0.999},
    "mean-teacher-by-line": {"weight": 10.0},
    **{name: {"estimators": 2} for name in ("voting", "bagging", "snapshot")},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_are_the_papers_and_of_the_wrappers_their_own(name: str) -> None:
    """A run with them written out is the run without them, over the epochs in which all terms are there."""
    losses = []
    for options in ({}, DEFAULTS[name]):
        torch.manual_seed(0)
        method = make(name, setting(epochs=7), **options)
        losses.append([advance(method, batch) for batch in batches(7)] + [method.predict(next(batches())[2])])
    for ours, theirs in zip(*losses, strict=True):
        assert torch.equal(ours, theirs)


# ---- one network and a loss ------------------------------------------------------------------------------------------


def test_self_distillation_mixes_the_labels_with_the_last_epochs_predictions() -> None:
    method = started("ps-kd", by_hand(normed))
    net, teacher = twin(method), None
    for batch in batches():
        epoch, step, x, y, _ = batch
        advance(method, batch)
        target, alpha = torch.eye(CLASSES, dtype=x.dtype)[y], 0.8 * (epoch + 1) / EPOCHS
        if teacher is not None:
            target = (1 - alpha) * target + alpha * probabilities(teacher(x)).detach()
        descend(net, cross_entropy(net(x), target), epoch)
        if step == STEPS - 1:
            teacher = copy.deepcopy(net).eval()
    assert_close(method.networks()["model"], net)


def test_saf_holds_the_model_to_its_logits_of_some_epochs_ago_by_sample() -> None:
    method = started("saf", by_hand(normed), lag=2, start=2, weight=0.7, temperature=3.0)
    net, past = twin(method), {}
    for batch in batches():
        epoch, step, x, y, index = batch
        if (epoch, step) in {(0, 1), (1, 0)}:  # rows that are not seen in this epoch
            x, y, index = x[:5], y[:5], index[:5]
        advance(method, (epoch, step, x, y, index))
        z = net(x)
        loss = cross_entropy(z, y)
        for row, sample in enumerate(index.tolist()):
            if epoch >= 2 and (epoch - 2, sample) in past:
                p, q = probabilities(past[epoch - 2, sample] / 3), probabilities(z[row : row + 1] / 3)
                loss = loss + 0.7 * 9 * (p * (p / q).log()).sum() / len(x)
            past[epoch, sample] = z[row : row + 1].detach()
        descend(net, loss, epoch)
    assert sum(epoch == 0 for epoch, _ in past) == SAMPLES - 3
    assert_close(method.networks()["model"], net)


# ---- two networks ----------------------------------------------------------------------------------------------------


def test_mutual_learning_updates_both_from_the_same_predictions() -> None:
    method = started("dml", by_hand(normed))
    model, peer = twin(method), twin(method, "peer")
    assert not torch.equal(model[0].weight, peer[0].weight)
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z, c = model(x), peer(x)
        p, q = probabilities(z), probabilities(c)
        pull_model = (q.detach() * (q.detach() / p).log()).sum(1).mean()
        pull_peer = (p.detach() * (p.detach() / q).log()).sum(1).mean()
        descend(model, cross_entropy(z, y) + pull_model, epoch)
        descend(peer, cross_entropy(c, y) + pull_peer, epoch)
    assert_close(method.networks()["model"], model)
    assert_close(method.networks()["peer"], peer)


def divergence(z: Tensor, c: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(z / 4, 1), F.softmax(c / 4, 1), reduction="batchmean")


@pytest.mark.parametrize("own_architecture", [False, True])
def test_companion_learning_passes_its_options_to_the_wrapper(own_architecture: bool) -> None:
    options: dict[str, Any] = {"weight": 0.5, "alpha": 0.3, "distance": "kl"}
    options["companion_lr_scale"] = 2.0
    if own_architecture:
        options["companion"] = functools.partial(smooth, width=3)
    method = started("dcl", by_hand(smooth if own_architecture else normed), **options)
    model, companion = twin(method), twin(method, "companion")
    assert companion[0].out_features == (3 if own_architecture else 8)
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z, c = model(x), companion(x)
        penalty = divergence(z, c.detach())
        chase = divergence(c, (0.3 * c + 0.7 * z).detach())
        apply(model, torch.autograd.grad(cross_entropy(z, y) + 0.5 * penalty, list(model.parameters())), rate(epoch))
        apply(companion, torch.autograd.grad(chase, list(companion.parameters())), 2 * rate(epoch))
    assert_close(method.networks()["model"], model)
    assert_close(method.networks()["companion"], companion)
    assert list(method.predictors()) == ["model", "companion", "mean of both"]


# ---- gradients at other weights --------------------------------------------------------------------------------------


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
    method = started("plain", by_hand(normed), rho=0.3)
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


# ---- averages and ensembles ------------------------------------------------------------------------------------------


def with_integers() -> nn.Module:
    net = normed()
    net.register_buffer("positions", torch.arange(50))
    return net


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_weight_average_weighs_each_step_by_the_decay(warm_up: bool) -> None:
    """With the warm-up it is the plain mean until the decay is reached: here in all steps, decay 0.999."""
    method = started("plain", by_hand(with_integers))
    net = method.networks()["model"]
    average = moving_average(net, 0.999 if warm_up else 0.9, warm_up)
    seen: list[dict[str, Tensor]] = []
    for batch in batches():
        advance(method, batch)
        average.update_parameters(net)
        seen.append(copy.deepcopy(net.state_dict()))
    last = len(seen) - 1
    weights = [0.9**last] + [0.1 * 0.9 ** (last - n) for n in range(1, last + 1)]
    if warm_up:
        weights = [1 / len(seen)] * len(seen)
    for name, value in average.module.state_dict().items():
        if value.is_floating_point():
            expected = sum(weight * state[name] for weight, state in zip(weights, seen, strict=True))
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
        else:
            assert torch.equal(value, seen[-1][name])


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
    mean = sum(probabilities(copy.deepcopy(net).eval()(x)) for net in nets) / 3
    torch.testing.assert_close(method.predict(x), mean.log().detach(), rtol=0, atol=1e-12)
