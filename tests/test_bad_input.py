"""Every bad argument is a clear error: its name, its value, the fix, and nothing has changed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, training_forwards

NAN = float("nan")


def build_three(*arguments):
    return 3


def build_no_optimizer(parameters):
    return None


SHARED = [
    ({"alpha": 1.5}, ValueError, r"alpha=1.5 must be in \[0, 1\]"),
    ({"alpha": -0.1}, ValueError, r"alpha=-0.1"),
    ({"alpha": NAN}, ValueError, r"alpha=nan"),
    ({"alpha": "0.6"}, TypeError, r"alpha='0.6' must be a number or a callable of the step, got str"),
    ({"weight": -1}, ValueError, r"weight=-1.0 must be finite and >= 0"),
    ({"weight": NAN}, ValueError, r"weight=nan"),
    ({"weight": float("inf")}, ValueError, r"weight=inf"),
    ({"weight": True}, TypeError, r"weight=True must be a number"),
    ({"distance": "mes"}, ValueError, r"distance='mes' is unknown; choose one of mse, squared, l1, kl, infonce, or"),
    ({"distance": 3}, TypeError, r"distance must be a name or a callable \(z, c\) -> scalar, got int"),
    ({"temperature": 2.0}, ValueError, r"temperature=2.0 is for distance 'kl' or 'infonce', not 'mse'"),
    ({"distance": "kl", "temperature": 0.0}, ValueError, r"temperature=0.0 must be a positive finite number"),
    ({"loss_scale": -2}, ValueError, r"loss_scale=-2 must be a positive finite number"),
    ({"loss_scale": "fp16"}, ValueError, r"loss_scale='fp16' is unknown; pass 'auto', a number, a GradScaler"),
]
DCL_ONLY = [
    ({"companion_lr_scale": 0}, ValueError, r"companion_lr_scale=0 must be a positive finite number"),
    ({"companion_lr_scale": "2"}, TypeError, r"companion_lr_scale='2' must be a number, got str"),
    ({"companion": "resnet"}, TypeError, r"companion must be a module, a callable that builds one, or None"),
    ({"companion": build_three}, TypeError, r"companion must be a module, a callable that builds one, or None, got 3"),
    (
        {"companion": mlp, "companion_optimizer": build_no_optimizer},
        TypeError,
        r"companion_optimizer must be an optimizer, a callable that builds one, or None, got None",
    ),
    (
        {"companion_optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
        ValueError,
        r"companion_optimizer holds none of the companion's parameters",
    ),
]
DCP_ONLY = [
    ({"num_classes": 0}, ValueError, r"num_classes=0 must be at least 1"),
    ({"num_classes": 2.5}, TypeError, r"num_classes=2.5 must be an integer, got float"),
    ({"num_classes": "3"}, TypeError, r"num_classes='3' must be an integer, got str"),
    ({"num_classes": True}, TypeError, r"num_classes=True must be an integer, got bool"),
    ({"ignore_index": 1.0}, TypeError, r"ignore_index=1.0 must be an integer, got float"),
    ({"targets": 3}, TypeError, r"targets must be a keyword's name or a callable"),
]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def identify(value):
    """A test's name is the same in each of pytest-xdist's processes, so it holds no address of an object."""
    return ",".join(value) if isinstance(value, dict) else str(value)[:40]


def refused(build, error, message):
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        build(model)
    assert_same(model.state_dict(), before)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("options", "error", "message"), SHARED + DCL_ONLY, ids=identify)
def test_dcl_arguments(options, error, message):
    refused(lambda model: DCLOptimizer(sgd(model), model, **{"weight": 1.0} | options), error, message)


@pytest.mark.parametrize(("options", "error", "message"), SHARED + DCP_ONLY, ids=identify)
def test_dcp_arguments(options, error, message):
    refused(
        lambda model: DCPOptimizer(
            sgd(model), model, **({"weight": 1.0, "alpha": 0.6} | {"num_classes": CLASSES} | options)
        ),
        error,
        message,
    )


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda m: DCLOptimizer(sgd(m), nn.Linear(3, 3), weight=1.0),
            ValueError,
            r"model shares no parameters with base_optimizer",
        ),
        (
            lambda m: DCLOptimizer(sgd(m), F.relu, weight=1.0),
            TypeError,
            r"model must be a torch.nn.Module, got function",
        ),
        (
            lambda m: DCLOptimizer(torch.optim.SGD, m, weight=1.0),
            TypeError,
            r"base_optimizer must be a torch.optim.Optimizer insta",
        ),
        (
            lambda m: DCLOptimizer(sgd(m), m, companion=m, weight=1.0),
            ValueError,
            r"companion shares trained parameters with the",
        ),
        (
            lambda m: DCLOptimizer(sgd(m), m, companion=nn.ReLU(), weight=1.0),
            ValueError,
            r"companion has no parameter to train",
        ),
    ],
)
def test_model_and_base(build, error, message):
    refused(build, error, message)


def test_wrapper_inside_a_wrapper():
    model = mlp()
    optimizer = DCLOptimizer(sgd(model), model, weight=1.0)
    with pytest.raises(TypeError, match=r"is a DCLOptimizer itself; wrap its base, optimizer.base"):
        DCLOptimizer(optimizer, model, weight=1.0)
    DCLOptimizer(optimizer.base, model, weight=1.0)


def test_bases_that_maximize():
    refused(
        lambda m: DCLOptimizer(torch.optim.SGD(m.parameters(), lr=0.1, maximize=True), m, weight=1.0),
        ValueError,
        r"maximize=True.*negate the loss",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": lambda t: 2.0 if t == 3 else 0.5}, r"alpha=2.0 at step 3"),
        ({"weight": lambda t: 1.0 - t / 2}, r"weight=-0.5 at step 3"),
    ],
)
def test_schedules_that_leave_their_range(options, message):
    model = mlp()
    optimizer = DCLOptimizer(sgd(model), model, **{"weight": 1.0} | options)
    data = list(batches(3))
    for x, y in data[:2]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.companion.state_dict()))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[2][0]), data[2][1])
    with pytest.raises(ValueError, match=message):
        loss.backward()
    assert_same((model.state_dict(), optimizer.companion.state_dict()), before)


def test_distance_that_is_no_scalar():
    model = mlp()
    optimizer = DCLOptimizer(sgd(model), model, distance=lambda z, c: (z - c).square(), weight=1.0)
    x, y = next(iter(batches(1)))
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(ValueError, match=r"distance must return a scalar, got shape \(16, 5\); reduce it"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    del optimizer


@pytest.mark.parametrize("make", [np.int64, np.int8, torch.tensor])
def test_integers_of_other_libraries_are_integers(make):
    model = mlp()
    kwargs = {"class_dim": make(1), "weight": 0.0}
    with DCPOptimizer(sgd(model), model, make(CLASSES), ignore_index=make(2), **kwargs) as dcp:
        dcp.set_targets(torch.tensor([0, 2, 1]))
        model(torch.randn(3, FEATURES, dtype=torch.float64)).sum().backward()
        dcp.step()
        assert dcp.forecaster.seen.tolist() == [True, True, False, False, False]
    with DCLOptimizer(sgd(model), model, companion_every=make(2), **kwargs) as dcl:
        assert copy.deepcopy(dcl.forecaster).__dict__["_options"].every == 2


@pytest.mark.parametrize("class_dim", [2, 5, -3])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_class_dim_that_the_logits_do_not_have(variant, class_dim):
    model = mlp()
    if variant == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, class_dim=class_dim)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, class_dim=class_dim)
    forwards = training_forwards(optimizer)
    with pytest.raises(ValueError, match=rf"class_dim={class_dim} but the model's logits have shape \(16, 5\)"):
        model(torch.randn(16, FEATURES, dtype=torch.float64))
    assert forwards == []


@pytest.mark.parametrize(
    ("shape", "class_dim", "num_classes", "mend"),
    [
        ((4, 7, 12), 1, 12, "pass class_dim=-1, along which it gives 12"),
        ((4, 12, 7), -1, 12, "pass class_dim=1, along which it gives 12"),
        ((4, 7, 12, 3), 1, 12, "pass class_dim=2, along which it gives 12"),
        ((4, 12, 6, 12), 2, 12, "pass class_dim=-1, along which it gives 12"),
        ((4, 7, 12), 1, 4, "pass num_classes="),
        ((4, 7, 12), 1, 5, "pass num_classes="),
        ((12, 7), 1, 12, "pass num_classes="),
    ],
)
def test_the_number_of_another_dimension_is_told_from_a_wrong_number(shape, class_dim, num_classes, mend):
    model = nn.Linear(3, shape[-1])
    optimizer = DCPOptimizer(sgd(model), model, num_classes, class_dim=class_dim)
    optimizer.set_targets(torch.zeros(shape[:-1], dtype=torch.long))
    z, logits = model(torch.randn(*shape[:-1], 3)), shape[class_dim]
    with pytest.raises(ValueError, match=rf"num_classes={num_classes} but the model gives {logits} logits.*{mend}"):
        z.sum().backward()
