"""Both optimizers compute on an accelerator what they compute on the CPU: weights and prototypes after some steps.

``python -m tests.devices.test_values`` trains all cases and prints how far they are apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import fake_device
from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.devices.on_device import answers, needs_device

pytestmark = needs_device
STEPS, ROWS, FEATURES = 8, 64, 32
WRAPPERS = {"DCL": partial(DCLOptimizer, companion_fraction=1), "DCP": DCPOptimizer}
# How far weights and prototypes may be apart, relative to the largest; foreach rounds otherwise than the CPU's loop.
TOLERANCES = {torch.float32: (3e-5, 1e-4), torch.bfloat16: (3e-2, 5e-2)}
MOVED = 10  # times the tolerance, which the penalty has to move the weights by for a comparison to say something


def quarter(z, y):
    return F.cross_entropy(z, y) / 4


def smoothed(z, y):
    return F.cross_entropy(z, y, label_smoothing=0.1)


def weighted(z, y):
    return F.cross_entropy(z, y, torch.linspace(0.5, 2.0, z.shape[1]).to(z))


@dataclass(frozen=True)
class Case:
    """A script; ``term`` says whether it adds the penalty to its loss, ``options`` are the wrapper's."""

    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    classes: int = 10
    dtype: torch.dtype = torch.float32
    images: bool = False
    ignored: bool = False
    mixed: bool = False
    term: bool = False
    options: dict[str, Any] = field(default_factory=lambda: {"weight": 0.5})


CASES = {
    "hard labels": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "loss / 4": Case(quarter),
    "label smoothing": Case(smoothed),
    "ignored labels": Case(ignored=True),
    "100 classes": Case(classes=100),
    "(N, K, H, W)": Case(images=True, classes=5),
    "two classes": Case(classes=2),
    "kl": Case(options={"weight": 5.0, "distance": "kl"}),
    "term": Case(quarter, term=True),
    "term, bfloat16": Case(dtype=torch.bfloat16, term=True),
    "term, (N, K, H, W), ignored labels": Case(images=True, classes=5, ignored=True, term=True),
    "term, class weights": Case(weighted, term=True),
    "term, mixup": Case(mixed=True, term=True),
}
BAD = ("a logit", "the loss")  # what is infinite
FORECASTERS = {"DCL": ("DCL", False), "DCP": ("DCP", False), "DCP, mixup": ("DCP", True)}


def network(case):
    torch.manual_seed(0)
    if case.images:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, case.classes, 1))
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, case.classes))


def batches(case):
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(4):
        inputs, labels = ((8, 3, 8, 8), (8, 8, 8)) if case.images else ((ROWS, FEATURES), (ROWS,))
        x, y = torch.randn(inputs, generator=generator), torch.randint(case.classes, labels, generator=generator)
        if case.ignored:
            y = y.masked_fill(torch.rand(labels, generator=generator) < 0.3, -100)
        if case.mixed:
            y = F.one_hot(y, case.classes).float()
            y = 0.7 * y + 0.3 * y.roll(1, 0)
        found.append((x.to(case.dtype), y))
    return found


def trained(case, method, device):
    """The weights and the prototypes after training; plain training and DCL have no prototypes."""
    model = network(case).to(device, case.dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = WRAPPERS[method](base, model, **case.options) if method in WRAPPERS else base
    data = [(x.to(device), y.to(device)) for x, y in batches(case)]
    for step in range(STEPS):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        z = model(x)
        loss = case.loss(z, y)
        if case.term and method in WRAPPERS:
            loss = loss + (optimizer.penalty(z, y) if method == "DCP" else optimizer.penalty(z))
        loss.backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().cpu().double().flatten() for parameter in model.parameters()])
    return weights, optimizer.prototypes.cpu().double() if method == "DCP" else torch.ones(1)


def apart(a, b):
    return float((a - b).abs().max() / b.abs().max())


def forecasts_after(bad, method, mixed, device):
    """The companion or the prototypes after 8 steps by the term, the 7th with a batch that is bad.

    Or left out, which for prototypes is one without labels: they age.
    """
    case = Case(mixed=mixed)
    model = network(case).to(device)
    optimizer = WRAPPERS[method](torch.optim.SGD(model.parameters(), lr=0.05), model, weight=0.5)
    for step, (x, y) in enumerate(batches(case) * 2, 1):
        is_bad = step == 7  # in which no value may be read
        if is_bad and bad == "left out":
            if method == "DCL":
                continue
            y = torch.zeros_like(y) if mixed else torch.full_like(y, -100)
        optimizer.zero_grad()
        bias = model[-1].bias.detach().clone()
        if is_bad and bad == "a logit":
            model[-1].bias.data[0] = torch.inf
        z, y = model(x.to(device)), y.to(device)
        loss = F.cross_entropy(z, y, reduction="sum")
        loss = loss + (optimizer.penalty(z, y) if method == "DCP" else optimizer.penalty(z))
        (loss * torch.inf if is_bad and bad == "the loss" else loss).backward()
        if is_bad:  # as a script that cleans its gradients
            model[-1].bias.data.copy_(bias)
            for parameter in model.parameters():
                parameter.grad.zero_()
        optimizer.step()
    found = [optimizer.prototypes] if method == "DCP" else optimizer.companion.parameters()
    return torch.cat([tensor.detach().cpu().flatten() for tensor in found])


def main():
    device, found = fake_device.register(), {}
    torch.set_num_threads(1)
    for name, case in CASES.items():
        plain = trained(case, "plain", fake_device.CPU)[0]
        for method in WRAPPERS:
            there, here = trained(case, method, device), trained(case, method, fake_device.CPU)
            differences = {"weights": apart(there[0], here[0]), "prototypes": apart(there[1], here[1])}
            found[f"{method}, {name}"] = differences | {"moved": apart(here[0], plain)}
    for name, (method, mixed) in FORECASTERS.items():
        runs = {bad: forecasts_after(bad, method, mixed, device) for bad in ("left out", *BAD)}
        found |= {f"{name}, {bad}": apart(runs[bad], runs["left out"]) for bad in BAD}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found():
    return answers(__name__)


@pytest.mark.parametrize("method", WRAPPERS)
@pytest.mark.parametrize("name", CASES)
def test_a_device_computes_what_the_cpu_computes(found, name, method):
    case = found[f"{method}, {name}"]
    weights, prototypes = TOLERANCES[CASES[name].dtype]
    assert case["weights"] < weights
    assert case["prototypes"] < prototypes
    assert case["moved"] > MOVED * TOLERANCES[torch.float32][0]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", FORECASTERS)
def test_the_term_learns_nothing_from_a_batch_that_is_not_finite_where_no_value_is_read(found, name, bad):
    assert found[f"{name}, {bad}"] == 0.0


if __name__ == "__main__":
    main()
