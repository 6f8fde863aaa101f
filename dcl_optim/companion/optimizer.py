"""The companion's optimizer: a copy of the base without its state."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Adagrad, Optimizer

from dcl_optim.pytorch.parameters import inner_of, parameters_of
from dcl_optim.pytorch.ranks import sum_of_norms

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

PASS_ANOTHER = "pass companion_optimizer=<callable that builds another optimizer from parameters>"


def are_zero(gradients: Iterable[Tensor]) -> bool:
    """Whether all are 0, on all ranks if they are shards. Synchronizes."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return sum_of_norms(dense, math.inf) == 0


def check_optimizer(base: Optimizer, make: MakeOptimizer | None) -> None:
    """Raise, before there is a companion, if no optimizer can be made for it."""
    if make is None:
        trained = list(parameters_of(base))
        copy_optimizer(base, trained, trained)
    elif not callable(make) or isinstance(make, Optimizer):
        raise TypeError(f"companion_optimizer must be a callable that builds one from parameters, got {make!r}")


def make_optimizer(base: Optimizer, theirs: list[Tensor], ours: list[Tensor], make: MakeOptimizer | None) -> Optimizer:
    """Give the optimizer that the user asked for: a copy of the base, or what a callable builds, which is left alone.

    Args:
        base, theirs, ours: see :func:`copy_optimizer`.
        make: the callable; None for a copy.
    """
    if make is None:
        return copy_optimizer(base, theirs, ours)
    made: Any = make(list(ours))
    if not isinstance(made, Optimizer) or not set(parameters_of(made)).issubset(ours):
        raise ValueError(
            "companion_optimizer must build an optimizer of the parameters that it gets, and of no others, but "
            f"returned {made!r}"
        )
    if hasattr(made, "train"):  # Schedule-Free has two modes
        made.train()
    return made


def copy_optimizer(base: Optimizer, theirs: list[Tensor], ours: list[Tensor]) -> Optimizer:
    """Copy an optimizer for other parameters, without its state and its hooks; optimizers that it holds are its own.

    Args:
        base: the optimizer; of one that wraps another, such as SAM, the inner one is copied.
        theirs: parameters of the base.
        ours: those in their place, and further ones, for the first group.
    """
    inner = inner_of(base)
    kind = type(inner)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{kind.__name__} cannot train the companion: it steps with a closure only; {PASS_ANOTHER}")
    copied = kind.__new__(kind)
    memo: dict[int, Any] = dict(zip(map(id, theirs), ours, strict=False))
    groups = [[memo[id(p)] for p in group["params"] if id(p) in memo] for group in base.param_groups]
    groups[0] += ours[len(theirs) :]
    for one in (base, inner):  # ZeroRedundancyOptimizer's trains a part of the parameters
        memo |= {id(group["params"]): own for group, own in zip(one.param_groups, groups, strict=True)}
    memo |= {id(inner): copied, id(inner.state): defaultdict(dict)}
    attributes: dict[str, Any] = {name: value for name, value in vars(inner).items() if name != "step"}
    attributes |= {name: OrderedDict() for name in attributes if name.endswith("_hooks")}
    try:
        vars(copied).update(copy.deepcopy(attributes, memo))
    except Exception as error:
        raise ValueError(
            f"the {kind.__name__} could not be copied for the companion ({error!r}); {PASS_ANOTHER}"
        ) from error
    followed = set(map(id, copied.param_groups))
    for held in memo.values():
        if isinstance(held, Optimizer):
            held.state.clear()
            if not followed.issuperset(map(id, held.param_groups)):
                raise ValueError(
                    f"the {kind.__name__} holds a {type(held).__name__} with other groups, whose options the "
                    f"companion cannot follow; {PASS_ANOTHER}"
                )
    if kind is Adagrad:  # torch before 2.14 makes its state in the constructor alone
        return Adagrad(copied.param_groups, **copied.defaults)
    return copied


def add_note(error: Exception, note: str) -> None:
    """Add a note to an error, which Python knows from 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)
