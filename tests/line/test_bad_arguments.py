"""Every bad argument is a clear error: its name, its value, the fix, and nothing has changed."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, fit, mlp, one, sgd, wrap

NAN = float("nan")


SHARED = [
    ({"alpha": 1.5}, ValueError, r"alpha=1.5 must be in \[0, 1\]"),
    ({"alpha": -0.1}, ValueError, r"alpha=-0.1"),
    ({"alpha": NAN}, ValueError, r"alpha=nan"),
    ({"alpha": "0.6"}, TypeError, r"alpha='0.6' must be a number, got str"),
    ({"weight": -1}, ValueError, r"weight=-1 must be in \[0, inf\)"),
    ({"weight": NAN}, ValueError, r"weight=nan"),
    ({"weight": float("inf")}, ValueError, r"weight=inf"),
    ({"weight": True}, TypeError, r"weight=True must be a number"),
    ({"distance": "mes"}, ValueError, r"distance='mes' is unknown; choose one of mse, squared, l1, kl, infonce, or"),
    ({"distance": 3}, TypeError, r"distance=3 must be a name, or a function \(z, c\) that returns one value"),
    ({"distance": nn.MSELoss}, TypeError, r"distance=<class .*MSELoss'> must be a name, or a function"),
    ({"logits": "out"}, TypeError, r"logits='out' must be a function of the model's output, or None"),
]
DCL_ONLY = [
    ({"companion_lr_scale": 0}, ValueError, r"companion_lr_scale=0 must be in \(0, inf\)"),
    ({"companion_lr_scale": "2"}, TypeError, r"companion_lr_scale='2' must be a number, got str"),
    (
        {"companion_lr_scale": 0.5, "companion_optimizer": torch.optim.SGD},
        ValueError,
        r"companion_lr_scale=0.5 has no effect with companion_optimizer; set",
    ),
    ({"companion_fraction": 0.0}, ValueError, r"companion_fraction=0.0 must be in \(0, inf\)"),
    ({"companion_fraction": 1.5}, ValueError, r"companion_fraction=1.5 must be in \(0, 1\]"),
    ({"companion": nn.Linear}, TypeError, r"companion must be a torch.nn.Module or None, got <class .*Linear"),
    (
        {"companion_optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
        TypeError,
        r"companion_optimizer must be a callable that builds one from parameters, got SGD",
    ),
    ({"weight": "Auto"}, ValueError, r"weight='Auto' is not known here; pass a number or a callable of the step"),
    ({"num_classes": 5}, TypeError, r"unexpected keyword argument 'num_classes'"),
]
DCP_ONLY = [
    ({"num_classes": 2.5}, TypeError, r"num_classes=2.5 must be an integer, got float"),
    ({"num_classes": True}, TypeError, r"num_classes=True must be an integer, got bool"),
    ({"update": "row"}, ValueError, r"update='row' is unknown; choose one of rows, batch"),
    (
        {"weight": "Auto"},
        ValueError,
        r"weight='Auto' is not known here; pass 'auto', a number or a callable of the step",
    ),
]


def identify(value):
    """A test's name is the same in each of pytest-xdist's processes, so it holds no address of an object."""
    return ",".join(value) if isinstance(value, dict) else getattr(value, "__name__", str(value)[:40])


def refused(build, error, message):
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        build(model)
    assert_same(model.state_dict(), before)
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
    assert all(hook.listener() is None for hook in hooks)  # of an optimizer that was made before the error


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [(DCLOptimizer, *row) for row in SHARED + DCL_ONLY] + [(DCPOptimizer, *row) for row in SHARED + DCP_ONLY],
    ids=identify,
)
def test_arguments(kind, options, error, message):
    refused(lambda model: kind(sgd(model), model, **options), error, message)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda m: DCLOptimizer(sgd(m), nn.Linear(3, 3)),
            ValueError,
            r"model shares no parameters with base_optimizer",
        ),
        (
            lambda m: DCLOptimizer(sgd(m), F.relu),
            TypeError,
            r"model must be a torch.nn.Module, got function",
        ),
        (
            lambda m: DCLOptimizer(torch.optim.SGD, m),
            TypeError,
            r"base_optimizer must be a torch.optim.Optimizer insta",
        ),
        (lambda m: DCPOptimizer(sgd(m), m, 1.0), TypeError, r"takes 3 positional arguments but 4 were given"),
        (
            lambda m: DCLOptimizer(sgd(m), m, companion=m),
            ValueError,
            r"companion shares trained parameters with the",
        ),
        (
            lambda m: DCLOptimizer(sgd(m), m, companion=nn.ReLU()),
            ValueError,
            r"companion has no parameter to train",
        ),
        (
            lambda m: DCLOptimizer(sgd(m), m, companion_optimizer=lambda parameters: None).companion_optimizer,
            ValueError,
            r"companion_optimizer must build an optimizer of .*, but returned None",
        ),
        (
            lambda m: DCLOptimizer(DCLOptimizer(sgd(m), m), m),
            TypeError,
            r"is a DCLOptimizer itself; wrap its base, optimizer.base",
        ),
        (
            lambda m: DCPOptimizer(torch.optim.SGD(m.parameters(), lr=0.1, maximize=True), m),
            ValueError,
            r"maximize=True.*negate the loss",
        ),
    ],
)
def test_model_and_base(build, error, message):
    refused(build, error, message)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alpha": lambda t: 2.0 if t == 3 else 0.5}, ValueError, r"alpha=2.0 at step 3"),
        ({"weight": lambda t: 1.0 - t / 2}, ValueError, r"weight=-0.5 at step 3"),
        ({"weight": lambda t: "one" if t == 3 else 1.0}, TypeError, r"weight='one' at step 3 must be a number, got"),
    ],
)
def test_schedules_that_leave_their_range(options, error, message):
    model = mlp()
    optimizer = wrap(model, **options)
    data = list(batches(3))
    fit(optimizer, data[:2])
    before = copy.deepcopy((model.state_dict(), optimizer.companion.state_dict()))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[2][0]), data[2][1])
    with pytest.raises(error, match=message):
        loss.backward()
    assert_same((model.state_dict(), optimizer.companion.state_dict()), before)


@pytest.mark.parametrize("make", [np.int64, np.int8, torch.tensor])
def test_integers_of_other_libraries_are_integers(make):
    model = mlp()
    x, y = one()
    dcp = DCPOptimizer(sgd(model), model, num_classes=make(CLASSES))
    z = model(x)
    dcp.penalty(z, y, ignore_index=make(2)).backward()
    dcp.step()
    assert dcp.prototypes.any(1).tolist() == [True, True, False, True, True]


def test_what_is_no_state_is_refused():
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    with pytest.raises(TypeError, match="state_dict must be a dictionary, got list"):
        optimizer.load_state_dict([])
