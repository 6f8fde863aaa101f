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

from examples.paper.methods import METHODS, Method, Setting, make
from examples.paper.methods.averages import moving_average
from tests.paper.test_paper_methods import (
    CLASSES,
    EPOCHS,
    FEATURES,
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
    "dcl": {"weight": 0.1, "alpha": 0.6, "distance": "mse"},
    "dcp": {"weight": "auto", "alpha": 0.97, "distance": "mse", "update": "rows"},
    "cs-kd": {"weight": 1.0, "temperature": 4.0},
    "voting": {"estimators": 2},
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


def test_plain_with_label_smoothing() -> None:
    method = started("plain", by_hand(), label_smoothing=0.2)
    net = twin(method)
    for batch in batches():
        epoch, _, x, y = batch
        advance(method, batch)
        target = 0.8 * torch.eye(CLASSES, dtype=x.dtype)[y] + 0.2 / CLASSES
        descend(net, cross_entropy(net(x), target), epoch)
    assert_close(method.networks()["model"], net)


# ---- two networks ----------------------------------------------------------------------------------------------------


def divergence(z: Tensor, c: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(z / 2, 1), F.softmax(c / 2, 1), reduction="batchmean")


@pytest.mark.parametrize("own_architecture", [False, True])
def test_companion_learning_passes_its_options_to_the_wrapper(own_architecture: bool) -> None:
    options: dict[str, Any] = {"weight": 0.5, "alpha": 0.3, "distance": "kl", "temperature": 2.0}
    options["companion_lr_scale"] = 2.0
    if own_architecture:
        options["companion"] = functools.partial(smooth, width=3)
    method = started("dcl", by_hand(smooth if own_architecture else normed), **options)
    model, companion = twin(method), twin(method, "companion")
    assert companion[0].out_features == (3 if own_architecture else 8)
    for batch in batches():
        epoch, _, x, y = batch
        advance(method, batch)
        z, c = model(x), companion(x)
        penalty = divergence(z, c.detach())
        chase = divergence(c, (0.3 * c + 0.7 * z).detach())
        apply(model, torch.autograd.grad(cross_entropy(z, y) + 0.5 * penalty, list(model.parameters())), rate(epoch))
        apply(companion, torch.autograd.grad(chase, list(companion.parameters())), 2 * rate(epoch))
    assert_close(method.networks()["model"], model)
    assert_close(method.networks()["companion"], companion)
    assert list(method.predictors()) == ["model", "companion", "mean of both"]


def test_companion_prototype_holds_the_model_to_its_class_means() -> None:
    method = started("dcp", by_hand(), weight=0.5, alpha=0.3, update="batch", distance="squared")
    net, prototypes = twin(method), {}
    for batch in batches():
        epoch, _, x, y = batch
        advance(method, batch)
        z = net(x)
        pulls = [(z[i] - prototypes[k]).square().mean() for i, k in enumerate(y.tolist()) if k in prototypes]
        loss = cross_entropy(z, y) + 0.5 * sum(pulls, torch.zeros(())) / len(y)
        for k in set(y.tolist()):
            mean = z[y == k].detach().mean(0)
            prototypes[k] = 0.3 * prototypes[k] + 0.7 * mean if k in prototypes else mean
        descend(net, loss, epoch)
    assert_close(method.networks()["model"], net)


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


def test_voting_trains_each_network_alone_and_averages_their_probabilities() -> None:
    method = started("voting", by_hand(normed), estimators=3)
    nets = [twin(method, name) for name in ("model", "model_2", "model_3")]
    assert len({net[0].weight.sum().item() for net in nets}) == 3
    for batch in batches():
        epoch, _, x, y = batch
        advance(method, batch)
        for net in nets:
            descend(net, cross_entropy(net(x), y), epoch)
    for name, net in zip(("model", "model_2", "model_3"), nets, strict=True):
        assert_close(method.networks()[name], net)
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    mean = sum(probabilities(copy.deepcopy(net).eval()(x)) for net in nets) / 3
    torch.testing.assert_close(method.predict(x), mean.log().detach(), rtol=0, atol=1e-12)
