"""The companion's optimizer: a copy of the base without its state."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Adagrad, Optimizer

from dcl_optim.pytorch.parameters import inner_of, optimizers_in, parameters_of
from dcl_optim.pytorch.ranks import sum_of_norms

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

PASS_ANOTHER = "pass companion_optimizer=<callable that builds another optimizer from parameters>"
NOTHING_TO_TRAIN = (
    "companion has no parameter to train: none has requires_grad=True and is in the optimizer.\n"
    "  Fix: unfreeze one, or ask for optimizer.companion before a forward pass with other parameters (functional_call)"
)


def are_zero(gradients: Iterable[Tensor]) -> bool:
    """Whether all are 0, on all ranks if they are shards; one whose values cannot be read is not."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    can_read = not any(gradient.is_meta for gradient in dense)
    return can_read and sum_of_norms(dense, math.inf) == 0


def check_optimizer(base: Optimizer, make: MakeOptimizer | None) -> None:
    """Raise, before there is a companion, if no optimizer can be made for it."""
    if make is None:
        copy_optimizer(base, [group["params"] for group in base.param_groups], {p: p for p in parameters_of(base)})
    elif not callable(make) or isinstance(make, Optimizer):
        raise TypeError(f"companion_optimizer must be a callable that builds one from parameters, got {make!r}")


def make_optimizer(
    base: Optimizer, groups: list[list[Tensor]], twins: dict[Tensor, Tensor], make: MakeOptimizer | None
) -> Optimizer:
    """Give the optimizer that the user asked for: a copy of the base, or what a callable builds, which is left alone.

    Args:
        base, groups, twins: see :func:`copy_optimizer`.
        make: the callable; None for a copy.
    """
    if not any(groups):
        raise ValueError(NOTHING_TO_TRAIN)
    if make is None:
        return copy_optimizer(base, groups, twins)
    made: Any = make(list(chain(*groups)))
    if not isinstance(made, Optimizer):
        raise TypeError(f"companion_optimizer must build an optimizer, but returned {made!r}")
    if hasattr(made, "train"):  # Schedule-Free has two modes
        made.train()
    return made


def copy_optimizer(base: Optimizer, groups: list[list[Tensor]], twins: dict[Tensor, Tensor]) -> Optimizer:
    """Copy an optimizer for other parameters, without its state and its hooks.

    Optimizers that it holds are copied with it. What shares a group with the base shares the copied one.

    Args:
        base: the optimizer; of one that wraps another, such as SAM, the inner one is copied.
        groups: the parameters in place of the base's, group by group.
        twins: for parameters of the base, those in their place.
    """
    inner = inner_of(base)
    kind = type(inner)
    _refuse(kind)
    memo: dict[int, Any] = {id(group["params"]): own for group, own in zip(base.param_groups, groups, strict=True)}
    memo |= {id(theirs): ours for theirs, ours in twins.items()}
    everyone = optimizers_in(inner)
    memo |= {id(one.state): defaultdict(dict) for one in everyone if hasattr(one, "state")}
    memo |= {id(one): type(one).__new__(type(one)) for one in everyone}
    copied: Optimizer = memo[id(inner)]
    try:
        options = [{key: group[key] for key in group if key != "param_names"} for group in base.param_groups]
        own_groups = copy.deepcopy(options, memo)
        for one in (base, inner):
            memo |= {id(theirs): ours for theirs, ours in zip(one.param_groups, own_groups, strict=True)}
            memo[id(one.param_groups)] = own_groups
        for one in everyone:
            vars(memo[id(one)]).update(_copy_of_attributes(one, memo))
    except Exception as error:
        raise ValueError(
            f"the {kind.__name__} could not be copied for the companion ({error!r}); {PASS_ANOTHER}"
        ) from error
    if kind is Adagrad:  # torch before 2.14 makes its state in the constructor alone
        return Adagrad(copied.param_groups, **copied.defaults)
    return copied


def _copy_of_attributes(optimizer: Optimizer, memo: dict[int, Any]) -> dict[str, Any]:
    """Copy what an optimizer holds, with empty tables of hooks; torch's own copies keep groups and state alone."""
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    tables: dict[str, Any] = {name: OrderedDict() for name in attributes if name.endswith("_hooks")}
    return copy.deepcopy(attributes | tables, memo)


def _refuse(kind: type[Optimizer]) -> None:
    """Raise ValueError for a class of optimizers that cannot train a companion."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if needs_closure:
        raise ValueError(f"{kind.__name__} cannot train the companion: it steps with a closure only; {PASS_ANOTHER}")


def add_note(error: Exception, note: str) -> None:
    """Add a note to an error, which Python knows from 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)
