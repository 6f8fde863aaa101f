"""A forecaster from outside the package: docs/dev/extending.md's, against Mean Teacher written out."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples import mean_teacher
from examples.mean_teacher import MeanTeacherOptimizer
from tests.helpers import assert_same, batch_norm_net, batches, mlp, sgd, train

WEIGHT, ALPHA = 0.7, 0.9
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def dropout_net():
    model = mlp()
    return nn.Sequential(*model[:-1], nn.Dropout(0.4), model[-1])


def wrapped(model, **options):
    return MeanTeacherOptimizer(sgd(model), model, **({"weight": WEIGHT, "alpha": ALPHA} | options))


def mean_teacher_step(model, teacher, optimizer, x, y):
    state = torch.get_rng_state()
    z = model(x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with torch.no_grad():
        c = teacher(x)
    torch.set_rng_state(after)
    optimizer.zero_grad()
    (F.cross_entropy(z, y) + WEIGHT * ((z - c) ** 2).mean()).backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(teacher.parameters(), model.parameters(), strict=True):
            average.copy_(ALPHA * average + (1 - ALPHA) * weight)


def test_it_needs_public_names_only():
    nodes = ast.walk(ast.parse(Path(mean_teacher.__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    assert "dcl_optim.forecaster.replayed" in names
    assert [name for name in names if "._" in name] == []


@pytest.mark.parametrize("build", [mlp, batch_norm_net, dropout_net])
def test_it_is_mean_teacher(build):
    model, theirs = build(), build()
    optimizer, plain = wrapped(model), sgd(theirs)
    teacher = copy.deepcopy(theirs)
    torch.manual_seed(1)
    train(model, optimizer, batches(20))
    torch.manual_seed(1)
    for x, y in batches(20):
        mean_teacher_step(theirs, teacher, plain, x, y)
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.teacher, teacher, **CLOSE)


@pytest.mark.parametrize("build", [mlp, batch_norm_net, dropout_net])
def test_without_weight_it_is_the_base_optimizer_to_the_last_bit(build):
    model, plain = build(), build()
    torch.manual_seed(1)
    train(model, wrapped(model, weight=0.0), batches(10))
    torch.manual_seed(1)
    train(plain, sgd(plain), batches(10))
    assert_same(model, plain)


def test_accumulated_parts_are_the_whole_batch():
    whole, parts = mlp(), mlp()
    in_one, in_two = wrapped(whole), wrapped(parts)
    for x, y in batches(5):
        train(whole, in_one, [(x, y)])
        in_two.zero_grad()
        for rows in (slice(0, 8), slice(8, 16)):
            (F.cross_entropy(parts(x[rows]), y[rows]) / 2).backward()
        in_two.step()
    assert_same(whole, parts, **CLOSE)
    assert_same(in_one.teacher, in_two.teacher, **CLOSE)


def test_a_resumed_run_is_the_uninterrupted_one():
    straight = batch_norm_net()
    uninterrupted = wrapped(straight)
    train(straight, uninterrupted, batches(10))
    first = batch_norm_net()
    optimizer = wrapped(first)
    train(first, optimizer, list(batches(10))[:4])
    resumed = batch_norm_net()
    resumed.load_state_dict(first.state_dict())
    second = wrapped(resumed)
    second.load_state_dict(optimizer.state_dict())
    train(resumed, second, list(batches(10))[4:])
    assert_same(resumed, straight)
    assert_same(second.state_dict(), uninterrupted.state_dict())


def test_a_step_that_a_scaler_skips_leaves_the_teacher():
    model = mlp()
    optimizer = wrapped(model)
    x, y = next(iter(batches(1)))
    before = copy.deepcopy(optimizer.teacher.state_dict())
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()  # and no step
    train(model, optimizer, [(x, y)])
    with torch.no_grad():
        expected = {name: ALPHA * before[name] + (1 - ALPHA) * weight for name, weight in model.named_parameters()}
    assert_same(optimizer.teacher.state_dict(), expected, **CLOSE)


def test_a_state_that_does_not_fit_changes_nothing():
    model, wide = mlp(), nn.Linear(3, 3).double()
    optimizer = wrapped(model)
    before = copy.deepcopy(optimizer.teacher.state_dict())
    state = optimizer.state_dict()
    state["dcl_optim.MeanTeacherOptimizer"]["forecaster"] = wide.state_dict()
    with pytest.raises(ValueError, match="the state of the WeightAverage does not fit"):
        optimizer.load_state_dict(state)
    assert_same(optimizer.teacher.state_dict(), before)
