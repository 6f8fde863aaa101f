"""A thousand malformed calls: a ValueError or a TypeError that names the argument, and nothing has changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, mlp, one, sgd
from tests.reliability import malformed
from tests.reliability.hostile import VARIANTS, Training

CONSTRUCTIONS, CALLS, RETURNS = 840, 120, 40
OWN = {"dcl": (malformed.WRONG_DCL, malformed.RIGHT_DCL), "dcp": (malformed.WRONG_DCP, malformed.RIGHT_DCP)}


def hooks(module: nn.Module) -> list[int]:
    return [len(vars(part)[name]) for part in module.modules() for name in vars(part) if name.endswith("_hooks")]


def refused(call: Callable[[], Any], names: list[str]) -> None:
    """A call has to raise an error whose message has one of the names in it."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert any(name in str(caught.value) for name in names), (names, str(caught.value))


def drawn_construction(draw: random.Random, variant: str) -> tuple[dict[str, Any], list[str]]:
    """Arguments of which one or two are wrong, and the names of these."""
    wrong, right = malformed.WRONG | OWN[variant][0], malformed.RIGHT | OWN[variant][1]
    names = draw.sample(sorted(wrong), draw.choice([1, 1, 2]))
    others = draw.sample(sorted(right), draw.randrange(4))
    options = {name: draw.choice(right[name]) for name in others} | {name: draw.choice(wrong[name]) for name in names}
    return options, names


@pytest.mark.parametrize("variant", VARIANTS)
def test_malformed_constructions(variant):
    draw, state = random.Random(variant), torch.get_rng_state()
    for _ in range(CONSTRUCTIONS // 2):
        with torch.random.fork_rng():
            model = mlp()
        base = sgd(model)
        before = copy.deepcopy((model.state_dict(), base.state_dict(), hooks(model)))
        options, names = drawn_construction(draw, variant)
        given = {"base_optimizer": base, "model": model} | options
        kind = DCLOptimizer if variant == "dcl" else DCPOptimizer
        refused(lambda given=given, kind=kind: kind(**given), names)
        assert_same((model.state_dict(), base.state_dict(), hooks(model)), before)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_malformed_calls(variant):
    draw, training = random.Random(variant), Training(variant, 2)
    optimizer: Any = training.optimizer
    x, y = one()
    z = training.model(x)
    calls = [(optimizer.load_state_dict, malformed.NO_STATES, "state")]
    calls.append((optimizer.step, malformed.NO_CLOSURES, "closure"))
    if variant == "dcl":
        calls.append((optimizer.penalty, malformed.NO_LOGITS, "logits"))
    else:
        calls.append((lambda bad: optimizer.penalty(bad, y), malformed.NO_LOGITS, "logits"))
        calls.append((lambda bad: optimizer.penalty(z, bad), malformed.NO_LABELS, "labels"))
    before = training.everything()
    for _ in range(CALLS // 2):
        call, wrong, name = draw.choice(calls)
        bad = draw.choice(wrong)
        refused(lambda call=call, bad=bad: call(bad), [name])
        assert training.everything() == before
    optimizer.zero_grad()
    training.criterion(z, y).backward()
    optimizer.step()  # a refused term is none
    assert optimizer.logs()["penalty"] > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["weight", "alpha"])
def test_malformed_returns_of_schedules(variant, name):
    x, y = one()
    for bad in malformed.WRONG_RETURNS:
        training = Training(variant, 2, **{name: lambda step, bad=bad: bad if step == 3 else 0.5})
        training.optimizer.zero_grad()
        before = training.everything()
        loss = training.criterion(training.model(x), y)
        refused(loss.backward, [name])
        assert training.everything() == before
        assert all(parameter.grad is None for parameter in training.model.parameters())


def test_they_are_a_thousand():
    assert CONSTRUCTIONS + CALLS + RETURNS == 1000
    assert 2 * 2 * len(malformed.WRONG_RETURNS) == RETURNS
