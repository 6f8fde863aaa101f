"""Accelerate's mixed precision begins inside the model's forward: where the companion runs, and in which precision."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, cells, mlp, sgd

ORDERS = ("wrapped before", "wrapped after")
FLOAT = torch.float32


def wrap(method, model):
    if method == "dcl":
        return DCLOptimizer(sgd(model), model, weight=5.0)
    return DCPOptimizer(sgd(model), model, weight=5.0, alpha=0.6)


def prepared(method, model, order, parts=1):
    """Either order of the two lines; both are found in scripts."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=parts)
    if order == "wrapped before":
        model, optimizer = accelerator.prepare(model, wrap(method, model))
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(wrap(method, model))
    return accelerator, model, optimizer


def train(accelerator, model, optimizer, criterion, data):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(criterion(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


class InBfloat16(nn.Module):
    """What Accelerate makes of a model."""

    def __init__(self, net, enabled):
        super().__init__()
        self.net, self.enabled = net, enabled

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            z = self.net(x)
        return z.float()


def by_hand(method, net, criterion, data, parts, enabled=True):
    model = InBfloat16(net, enabled)
    optimizer = wrap(method, model)
    for index, (x, y) in enumerate(data, start=1):
        if method == "dcp":  # given, which Accelerate's loop has read
            optimizer.set_targets(y)
        (criterion(model(x), y) / parts).backward()
        if index % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def own(method, optimizer):
    """The companion's weights and its optimizer's state, or the prototypes."""
    if method == "dcp":
        return optimizer.prototypes
    return [*optimizer.companion.parameters()], optimizer.companion_optimizer.state_dict()


def data(steps=8):
    return list(batches(steps, dtype=FLOAT))


@pytest.mark.parametrize(
    ("method", "parts", "order"),
    cells(
        product(["dcl", "dcp"], [1, 2], ORDERS),
        ("dcl", 2, "wrapped before"),
        ("dcl", 1, "wrapped after"),
        ("dcp", 2, "wrapped after"),
    ),
)
def test_bfloat16_is_the_hand_written_loop_under_autocast(method, parts, order):
    criteria = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    accelerator, model, optimizer = prepared(method, mlp(dtype=FLOAT), order, parts)
    train(accelerator, model, optimizer, criteria[0], data())
    second = by_hand(method, expected := mlp(dtype=FLOAT), criteria[1], data(), parts)
    assert_same(model, expected)
    assert_same(own(method, optimizer.optimizer), own(method, second))
    full = mlp(dtype=FLOAT)
    by_hand(method, full, nn.CrossEntropyLoss(), data(), parts, enabled=False)
    assert not torch.equal(full[0].weight, model[0].weight)


@pytest.mark.parametrize("order", ORDERS)
def test_the_companion_runs_in_the_models_precision(order):
    accelerator, model, optimizer = prepared("dcl", mlp(dtype=FLOAT), order)
    dtypes: dict[str, torch.dtype] = {}
    for name, network in (("model", model), ("companion", optimizer.optimizer.companion)):
        network[0].register_forward_hook(lambda module, args, output, name=name: dtypes.update({name: output.dtype}))
    train(accelerator, model, optimizer, nn.CrossEntropyLoss(), data(1))
    assert dtypes == {"model": torch.bfloat16, "companion": torch.bfloat16}
    assert optimizer.optimizer.penalty == 0.0, "a copy that computes as the model does"


def test_the_companion_leaves_mixed_precision_with_the_model():
    """`unwrap_model` takes Accelerate's forward off again, in the middle of a run."""
    accelerator, model, optimizer = prepared("dcl", mlp(dtype=FLOAT), "wrapped before")
    train(accelerator, model, optimizer, nn.CrossEntropyLoss(), data(2))
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    dtypes = []
    optimizer.optimizer.companion[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    train(accelerator, model, optimizer, nn.CrossEntropyLoss(), data(1))
    assert dtypes == [FLOAT]


class WithAnIsland(nn.Module):
    """Its last layer stays in float32 under autocast, as numerically delicate heads do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(features.float())


def test_the_companions_backward_is_outside_of_the_scripts_autocast():
    """Also if the script calls backward inside: the model's backward pass is its own affair."""
    torch.manual_seed(0)
    model = WithAnIsland()
    expected = copy.deepcopy(model)
    (x, y), gradients = next(iter(data())), []
    for network, inside in ((model, True), (expected, False)):
        optimizer = DCLOptimizer(sgd(network), network, weight=5.0)
        with torch.no_grad():
            for parameter in optimizer.companion.parameters():
                parameter.mul_(0.9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = network(x)
        loss = F.cross_entropy(z, y)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            loss.backward()
        gradients.append([parameter.grad for parameter in optimizer.companion.parameters()])
    assert_same(*gradients)
    assert all(gradient.any() for gradient in gradients[0])


def test_a_companion_that_calls_the_model_is_reported():
    """A function in the place of ``forward`` still belongs to the model after a deepcopy, which copies no closures."""
    model = mlp()
    forward, before = model.forward, copy.deepcopy(model.state_dict())
    model.forward = lambda x: forward(x)
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    x, y = next(batches(1))
    with pytest.raises(RuntimeError, match="companion="):
        F.cross_entropy(model(x), y).backward()
    assert optimizer.companion is not model
    assert_same(model.state_dict(), before)
