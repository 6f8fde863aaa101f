"""A forecaster from outside the package: docs/dev/extending.md's, against Mean Teacher written out."""

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples import mean_teacher
from examples.mean_teacher import MeanTeacherOptimizer
from tests.helpers import (
    MODELS,
    assert_same,
    batch_norm_net,
    batches,
    fit,
    mlp,
    sgd,
    train,
)
from tests.project.test_public_api import documented
from tests.reference import NEAR

WEIGHT, ALPHA = 0.7, 0.9


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
    (F.cross_entropy(z, y) + WEIGHT * ((z.softmax(1) - c.softmax(1)) ** 2).mean()).backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(teacher.parameters(), model.parameters(), strict=True):
            average.copy_(ALPHA * average + (1 - ALPHA) * weight)


def test_what_it_imports_is_on_the_api_pages():
    nodes = ast.walk(ast.parse(Path(mean_teacher.__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module.startswith("dcl_optim")]
    names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert "dcl_optim.companion.replay.Replay" in names
    assert names - set(documented()) == {"dcl_optim.pull.Scale"}  # a type


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_it_is_mean_teacher(build):
    model, theirs = build(), build()
    optimizer, plain = wrapped(model), sgd(theirs)
    teacher = copy.deepcopy(theirs)
    torch.manual_seed(1)
    fit(optimizer, batches(20))
    torch.manual_seed(1)
    for x, y in batches(20):
        mean_teacher_step(theirs, teacher, plain, x, y)
    assert_same(model, theirs, **NEAR)
    assert_same(optimizer.teacher, teacher, **NEAR)


def test_by_default_the_teacher_is_the_mean_of_all_weights_so_far():
    model = mlp()
    optimizer = MeanTeacherOptimizer(sgd(model), model)
    seen = []
    for batch in batches(7):
        train(model, optimizer, [batch])
        seen.append(copy.deepcopy(model.state_dict()))
    for name, average in optimizer.teacher.state_dict().items():
        torch.testing.assert_close(average, torch.stack([state[name] for state in seen]).mean(0), **NEAR)


def test_a_resumed_run_is_the_uninterrupted_one():
    straight, first, resumed = batch_norm_net(), batch_norm_net(), batch_norm_net()
    data = list(batches(10))
    uninterrupted, optimizer = wrapped(straight), wrapped(first)
    fit(uninterrupted, data)
    fit(optimizer, data[:4])
    resumed.load_state_dict(first.state_dict())
    second = wrapped(resumed)
    second.load_state_dict(optimizer.state_dict())
    fit(second, data[4:])
    assert_same(resumed, straight)
    assert_same(second.state_dict(), uninterrupted.state_dict())
