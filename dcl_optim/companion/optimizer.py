"""The companion's optimizer: a copy of the base without its state, whose groups follow the base's at every step.

What a schedule changes in the base's groups reaches the companion's. What an optimizer counts in its own groups
(Schedule-Free's averages, Prodigy's estimates) stays each one's own.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from dcl_optim.companion.wide_weights import WideWeights
from dcl_optim.pytorch.internals import count_as_step
from dcl_optim.pytorch.parameters import gradients_of, inner_of, optimizers_in, parameters_of
from dcl_optim.pytorch.ranks import sum_of_norms

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

FOLLOWED = ("lr", "weight_decay", "momentum", "betas")  # what schedules change
PASS_ANOTHER = "pass companion_optimizer=<callable that builds another optimizer from parameters>"
NOTHING_TO_TRAIN = (
    "companion has no parameter to train: none has requires_grad=True and is in the optimizer.\n"
    "  Fix: unfreeze one, or ask for optimizer.companion before a forward pass with other parameters (functional_call)"
)


class CompanionOptimizer:
    """Trains the companion as the base optimizer trains the model: class, options, groups, schedule.

    An optimizer that was built by a callable is left alone.

    Args:
        base: the model's optimizer.
        twins: for parameters of the base, the companion's in their place.
        others: further parameters of the companion, which come after those of the first group.
        make: the callable; None for an optimizer like the base.
        lr_scale: the companion's learning rate divided by the base's.

    Attributes:
        optimizer: the optimizer.
        wide: the float32 weights behind parameters in half precision, which the optimizer steps in their place.
        has_begun: whether a gradient was not 0. A copy of the model begins with gradients of exactly 0, by which some
            optimizers divide later; until then no step is taken.
    """

    def __init__(
        self,
        base: Optimizer,
        twins: dict[Tensor, Tensor],
        others: list[nn.Parameter],
        make: MakeOptimizer | None,
        lr_scale: float,
    ) -> None:
        self._base = base
        self._follows = make is None
        self._lr_scale = lr_scale
        self.wide = WideWeights((*twins.values(), *others))
        stepped = {theirs: self.wide.behind(ours) for theirs, ours in twins.items()}
        groups = [[stepped[p] for p in group["params"] if p in stepped] for group in base.param_groups]
        groups[0] += map(self.wide.behind, others)
        if not any(groups):
            raise ValueError(NOTHING_TO_TRAIN)
        self.optimizer = copy_optimizer(base, groups, stepped) if make is None else make(list(chain(*groups)))
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"companion_optimizer must build an optimizer, but returned {self.optimizer!r}")
        self.wide.keep(set(parameters_of(self.optimizer)))  # a callable may have taken the network's own
        self.has_begun = False
        if make is not None and hasattr(self.optimizer, "train"):  # Schedule-Free has two modes
            self.optimizer.train()
        self.follow_options()

    def follow_options(self) -> None:
        """Give the groups the base's learning rate, weight decay and momentum."""
        if not self._follows:
            return
        for theirs, ours in zip(self._base.param_groups, self.optimizer.param_groups, strict=False):
            for key in FOLLOWED:
                if key in theirs:
                    value = theirs[key]
                    if key == "lr" and self._lr_scale != 1:
                        value = value * self._lr_scale
                    ours[key] = value.clone() if isinstance(value, Tensor) else value

    def step(self) -> None:
        """Step with the base's options.

        Nothing is done before the first gradient that is not 0. To ask synchronizes, mostly in two steps.
        """
        self.has_begun = self.has_begun or not _are_zero(gradients_of(self.optimizer))
        if not self.has_begun:
            count_as_step(self.optimizer)
            return
        self.follow_options()
        try:
            self.optimizer.step()
        except Exception as error:
            add_note(error, f"This was raised in the step of the companion's optimizer: {PASS_ANOTHER}")
            raise
        if self.wide.weights:
            self.wide.write_network()

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """The gradients that the network's backward passes have added up since the last step."""
        return [*gradients_of(self.optimizer), *self.wide.narrow_gradients()]

    def fill_gradients(self) -> None:
        """Give a gradient of zero to each parameter that has none and trains."""
        self.wide.follow_frozen()
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def zero_grad(self) -> None:
        """Clear the gradients, also those of a network in half precision."""
        self.optimizer.zero_grad()
        self.wide.clear_gradients()

    def __getstate__(self) -> dict[str, Any]:
        self.wide.read_network()  # before the optimizer's parameters are copied
        return self.__dict__


def _are_zero(gradients: Iterable[Tensor]) -> bool:
    """Whether all are 0, on all ranks if they are shards; one whose values cannot be read is not."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    can_read = not any(gradient.is_meta for gradient in dense)
    return can_read and sum_of_norms(dense, math.inf) == 0


def try_to_copy(base: Optimizer, make: MakeOptimizer | None) -> None:
    """Raise, before there is a companion, if no optimizer can be made for it."""
    if make is None:
        copy_optimizer(base, [group["params"] for group in base.param_groups], {p: p for p in parameters_of(base)})
    elif not callable(make) or isinstance(make, Optimizer):
        raise TypeError(f"companion_optimizer must be a callable that builds one from parameters, got {make!r}")


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
