"""The chase's pace: what alpha means for an optimizer that divides a constant factor of the gradient out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcl_optim import random_state
from dcl_optim.mirror import NO_OPTIONS, second

TRIAL_LR, TRIAL_STEPS = 1e-3, 10  # some start as plain momentum until their averages are worth something (RAdam)
SAME = 1e-2  # what epsilons in denominators may make of a factor of two


def ignores_gradient_scale(optimizer: Optimizer) -> bool:
    """Find out, by a second such optimizer on a trial matrix, whether it moves as far for twice the gradients.

    So it is with Adam and its kin, with sign descent and with orthogonalised updates, and not with SGD.
    """
    try:
        once, twice = (_trial_move(optimizer, factor).cpu() for factor in (1.0, 2.0))
    except Exception:  # one that cannot be tried (it wants a closure, or parameters of its own kind)
        return False
    return bool(once.abs().sum() > 0) and torch.allclose(once, twice, rtol=SAME, atol=0.0)


def _trial_move(optimizer: Optimizer, factor: float) -> Tensor:
    """How a trial matrix moves in the last of some steps with gradients multiplied by a factor."""
    group = next(group for group in optimizer.param_groups if group["params"])
    device = group["params"][0].device
    matrix = torch.nn.Parameter(torch.tensor([[0.3, -0.5], [0.7, 0.2]], device=device))
    gradients = torch.tensor([[[1.0, -0.4], [0.6, 0.9]], [[0.8, -0.7], [0.5, 1.1]]], device=device)
    options: dict[str, Any] = {key: value for key, value in group.items() if key not in NO_OPTIONS}
    options |= {key: value for key, value in (("lr", TRIAL_LR), ("weight_decay", 0.0)) if key in options}
    trial, before = second(optimizer, [options | {"params": [matrix]}]), matrix.detach()
    getattr(trial, "train", _nothing)()  # Schedule-Free
    with random_state.kept(optimizer):  # an optimizer that draws draws the same numbers for both factors
        for step in range(TRIAL_STEPS):
            before = matrix.detach().clone()
            matrix.grad = factor * gradients[step % 2]
            trial.step()
    return matrix.detach() - before


def _nothing() -> None:
    return None


@contextmanager
def slowed(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply an optimizer's learning rates inside the block; rates that it changes there itself stay its own."""
    groups = [group for group in optimizer.param_groups if "lr" in group] if factor != 1 else []
    before = [_value(group["lr"]) for group in groups]
    for group, rate in zip(groups, before, strict=True):
        _put(group, rate * factor)
    inside = [_value(group["lr"]) for group in groups]
    try:
        yield
    finally:
        for group, rate, slow in zip(groups, before, inside, strict=True):
            own = group["lr"]
            _put(group, rate if isinstance(own, Tensor) or own == slow or not factor else own / factor)


def _value(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate


def _put(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate)  # in place: a captured or compiled step holds on to the tensor
    else:
        group["lr"] = rate
