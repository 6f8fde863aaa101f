"""Learning rate schedulers of each kind drive both networks: each step's options, and the run they lead to."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler, swa_utils

from dcl_optim import distances
from tests.helpers import assert_same, batches, every, fit, mlp, wrap
from tests.reference import NEAR, dcl_step

STEPS = 12
LOSSES = (3.0, 2.0, 2.0, 2.0, 1.0, 1.5, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5)  # for the scheduler that looks at them
METHOD = {"weight": 0.7, "alpha": 0.4}
BASES = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4),
    "adamw": partial(torch.optim.AdamW, weight_decay=1e-2),
}
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t, g=g: 0.9 ** (t * (g + 1)) for g in range(groups_of(o))]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6),
}
CYCLES_MOMENTUM = {"CyclicLR", "OneCycleLR"}


def groups_of(optimizer):
    return len(optimizer.param_groups)


def one_group(model, base):
    return BASES[base](model.parameters(), lr=0.05)


def several_groups(model, base):
    groups = [{"params": model[2].parameters(), "lr": 0.05}, {"params": model[0].parameters(), "weight_decay": 0.0}]
    return BASES[base](groups, lr=0.02)


def tensor_rate(model, base):
    return BASES[base](model.parameters(), lr=torch.tensor(0.05, dtype=torch.float64))


LAYOUTS = {"one group": one_group, "several groups": several_groups, "tensor": tensor_rate}


def step_scheduler(scheduler, step):
    scheduler.step(*([LOSSES[step]] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def options_of(optimizer):
    """What a step uses of its groups, as plain numbers."""
    used = ("lr", "momentum", "betas", "weight_decay")
    return [{key: plain(group[key]) for key in used if key in group} for group in optimizer.param_groups]


def plain(value):
    return tuple(float(item) for item in value) if isinstance(value, (tuple, list)) else float(value)


def recorded(optimizer):
    """The options of each step that the optimizer takes from now on."""
    history = []
    optimizer.register_step_pre_hook(lambda taking, *_: history.append(options_of(taking)))
    return history


def scaled(options, factor):
    return [group | {"lr": group["lr"] * factor} for group in options]


def written_out(scheduler, base, layout, factor):
    """The algorithm by hand: the model's optimizer has the scheduler, the companion's is set to it before each step."""
    model, companion = mlp(), mlp(seed=3)
    optimizer, chasing = LAYOUTS[layout](model, base), LAYOUTS[layout](companion, base)
    schedule, history = SCHEDULERS[scheduler](optimizer), recorded(optimizer)
    for step, (x, y) in enumerate(batches(STEPS)):
        for ours, theirs in zip(chasing.param_groups, scaled(options_of(optimizer), factor), strict=True):
            ours.update(theirs)
        dcl_step(model, companion, optimizer, chasing, x, y, F.cross_entropy, distances.mse, **METHOD)
        step_scheduler(schedule, step)
    return model, companion, history


@pytest.mark.parametrize(
    ("scheduler", "base", "layout", "factor"),
    every(11, product(SCHEDULERS, BASES, LAYOUTS, [1.0, 0.5])),
)
def test_a_scheduler_drives_both_networks(scheduler, base, layout, factor):
    model = mlp()
    optimizer = wrap(model, LAYOUTS[layout](model, base), companion=mlp(seed=3), companion_lr_scale=factor, **METHOD)
    schedule = SCHEDULERS[scheduler](optimizer)
    theta, omega = recorded(optimizer.base), recorded(optimizer.companion_optimizer)
    for step, (x, y) in enumerate(batches(STEPS)):
        fit(optimizer, [(x, y)])
        step_scheduler(schedule, step)

    theirs, companion, expected = written_out(scheduler, base, layout, factor)
    assert theta == expected
    assert omega == [scaled(options, factor) for options in expected]
    momentum = "momentum" if base == "sgd" else "betas"
    for key in ("lr", momentum) if scheduler in CYCLES_MOMENTUM else ("lr",):
        assert len({options[-1][key] for options in theta}) > 1, f"{key} has to have moved"
    assert_same((model, optimizer.companion), (theirs, companion), **NEAR)


def test_scheduler_of_the_base_built_before_it_was_wrapped():
    results = []
    for early in (True, False):
        model = mlp()
        base = one_group(model, "sgd")
        early_schedule = lr_scheduler.StepLR(base, 2, 0.5) if early else None
        optimizer = wrap(model, base, companion=mlp(seed=3))
        schedule = early_schedule or lr_scheduler.StepLR(optimizer, 2, 0.5)
        omega = recorded(optimizer.companion_optimizer)
        for batch in batches(6):
            fit(optimizer, [batch])
            schedule.step()
        assert [options[0]["lr"] for options in omega] == [0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(*results)
