"""The rules for the penalty's weight that the automatic one was compared with, against loops by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim import AutoWeight
from dcl_optim.distances import mse
from dcl_optim.reference import dcp_step
from tests.paper.test_paper_methods import (
    CLASSES,
    STEPS,
    advance,
    assert_close,
    assert_resumes,
    assert_same,
    batches,
    frozen,
    started,
    train,
)
from tests.paper.test_paper_methods_formulas import DECAY, by_hand, rate, twin

DCP: dict[str, Any] = {"alpha": 0.9, "update": "rows"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("dcp", DCP | {"rule": {"signal": "accuracy", "power": 2}}),
    "loss": ("dcp", DCP | {"rule": {"signal": "loss", "power": 0.5}}),
    "by class": ("dcp", DCP | {"weight": 1.0, "prototypes": "weights by class", "distance": "squared"}),
    "batch means": ("dcp", DCP | {"weight": 0.5, "prototypes": "batch means", "distance": "squared"}),
    "dcl": ("dcl", {"distance": "kl", "rule": {"signal": "accuracy", "power": 2, "floor": 0.0, "factor": 16}}),
}


@pytest.mark.parametrize("arm", ARMS)
def test_a_resumed_run_equals_the_uninterrupted_one(arm: str) -> None:
    name, options = ARMS[arm]
    assert_resumes(lambda seed: started(name, seed=seed, **options), STEPS + 1)


@pytest.mark.parametrize("signal", ["accuracy", "loss"])
def test_the_weight_follows_a_running_mean_of_the_training(signal: str) -> None:
    method = started("dcp", by_hand(), **ARMS[signal][1])
    net, prototypes, numbers, seen = twin(method), {}, {}, []
    plain = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=DECAY)
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        plain.param_groups[0]["lr"] = rate(epoch)
        weights = [0.98**age for age in range(len(seen))][::-1]
        mean = sum(w * value for w, value in zip(weights, seen, strict=True)) / sum(weights) if seen else 0.0
        weight = max(0.1, mean**2 if signal == "accuracy" else math.exp(-0.5 * mean) if seen else 0.0)
        z = net(x).detach()
        seen.append(float((z.argmax(1) == y).double().mean() if signal == "accuracy" else F.cross_entropy(z, y)))
        dcp_step(net, prototypes, plain, x, y, F.cross_entropy, mse, weight=weight, alpha=0.9, numbers=numbers)
    assert_close(method.networks()["model"], net, 1e-6)


def test_prototypes_of_the_experiments_follow_the_accuracy_of_an_automatic_weight() -> None:
    options = DCP | {"prototypes": "batch means", "distance": "squared"}
    ends = []
    for weight in ({"rule": {"signal": "accuracy", "power": 2}}, {"weight": AutoWeight(power=2)}):
        method = started("dcp", **options, **weight)
        train(method)
        ends.append(frozen(method))
    assert_same(*ends)


def by_class_and_batch_means(arm: str, z: Tensor, y: Tensor, state: dict[int, Any]) -> None:
    """One update of the arm's prototypes: mean, n and the number of right rows of each class."""
    for k in sorted({int(label) for label in y}):
        rows, right = z[y == k], float((z[y == k].argmax(1) == k).sum())
        before, number, rights = state.get(k, (torch.zeros(CLASSES, dtype=z.dtype), 0.0, 0.0))
        if arm == "batch means":
            number = 0.9 * number + 1
            state[k] = before + (rows.mean(0) - before) / number, number, rights
        else:
            number, rights = 0.9 * number + len(rows), 0.9 * rights + right
            state[k] = before + (rows - before).sum(0) / number, number, rights


@pytest.mark.parametrize("arm", ["by class", "batch means"])
def test_other_prototypes_by_hand(arm: str) -> None:
    method = started("dcp", by_hand(), **ARMS[arm][1])
    net, state = twin(method), {}
    plain = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=DECAY)
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        plain.param_groups[0]["lr"] = rate(epoch)
        z = net(x)
        terms = []
        for row, label in zip(z, y.tolist(), strict=True):
            if label in state:
                mean, number, rights = state[label]
                weight = 0.5 if arm == "batch means" else max(0.1, (rights / number) ** 6)
                terms.append(weight * (row - mean).square().mean())
        plain.zero_grad()
        (F.cross_entropy(z, y) + sum(terms) / len(y)).backward()
        plain.step()
        by_class_and_batch_means(arm, z.detach(), y, state)
    assert_close(method.networks()["model"], net, 1e-6)
