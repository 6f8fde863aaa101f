"""Questions about any torch optimizer: its parameters and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_not

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Without a line of Python for each parameter: a step may ask about all of them.
_gradient = attrgetter("grad")
requires_grad = attrgetter("requires_grad")
_exists = functools.partial(is_not, None)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters that an optimizer trains, group by group."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def first_trained(optimizer: Optimizer) -> Tensor | None:
    """The first parameter that an optimizer trains now; None if all are frozen."""
    for group in optimizer.param_groups:
        for parameter in filter(requires_grad, group["params"]):
            return parameter
    return None


def has_other_parameters(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether none of its parameters is one of the model's: DeepSpeed puts its copies in their place."""
    return set(map(id, parameters_of(optimizer))).isdisjoint(map(id, model.parameters()))


def gradients_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients of the parameters that have one."""
    return filter(_exists, map(_gradient, parameters))


def have_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter has a gradient."""
    return next(gradients_of(parameters_of(optimizer)), None) is not None


def have_zeros(optimizer: Optimizer) -> bool:
    """Whether there are gradients, and all of them are 0. Synchronizes."""
    return have_gradients(optimizer) and not any(map(torch.any, gradients_of(parameters_of(optimizer))))


def inner_of(base: Optimizer) -> Optimizer:
    """The optimizer that updates the weights where the base wraps one: SAM's, ZeroRedundancyOptimizer's.

    One with fewer groups than the base trains only some of the parameters.
    """
    candidates = (getattr(base, name, None) for name in ("base_optimizer", "optim"))
    inner = next((one for one in candidates if isinstance(one, Optimizer)), base)
    return inner if len(inner.param_groups) == len(base.param_groups) else base


@contextmanager
def all_or_nothing(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer its groups and its state back if the block, which loads others, raises."""
    before = [(one, dict(vars(one))) for one in (optimizer, inner_of(optimizer))]  # SAM binds its groups to both
    try:
        yield
    except Exception:
        for one, held in before:  # torch binds new objects when it loads, and leaves the old ones as they were
            vars(one).update(held)
        raise
