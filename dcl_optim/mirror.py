"""The companion's optimizer: a second one of the base's class whose groups mirror the base's, at every step.

What the script changes in the base's groups (a schedule, a momentum cycle) reaches the companion's. What an optimizer
counts in its own groups (Schedule-Free's averages, Prodigy's estimates) stays each one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dcl_optim.wrapper import parameters_of

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


class MirroredOptimizer:
    """Trains the companion as the base optimizer trains the model: class, hyper-parameters, groups, schedule.

    A companion's parameter is in the group that holds the model's parameter of the same name. Parameters of a
    different architecture, whose names the model does not know, follow the base's first group.

    Args:
        base: the optimizer of the model.
        model: the model.
        lr_scale: the companion's learning rate divided by the base's.
        given: an optimizer of the companion's own, or a callable that builds one from parameters; it is then left
            alone, hyper-parameters and schedule too. None mirrors the base.
    """

    def __init__(self, base: Optimizer, model: nn.Module, lr_scale: float, given: Optimizer | MakeOptimizer | None):
        self._base, self._model, self._lr_scale, self._given = base, model, lr_scale, given
        self._followed: list[int] = []  # for each of our groups the base's group it mirrors
        self._seen: list[dict[str, Any]] = []  # the base's options after its last step

    def build(self, companion: nn.Module, strangers: bool) -> Optimizer:
        """Build the optimizer over what the companion trains; ``strangers`` lets unknown names follow group 0.

        Raises:
            ValueError: no second optimizer of the base's class can be built, or the given one does not fit.
        """
        groups = self._groups(companion, strangers)
        trained = [p for parameters in groups.values() for p in parameters]
        if not trained:
            raise ValueError("companion has no parameter to train: none has requires_grad=True and is in the optimizer")
        if isinstance(self._given, Optimizer):
            if not {id(p) for p in trained} & {id(p) for p in parameters_of(self._given)}:
                raise ValueError("companion_optimizer holds none of the companion's parameters")
            return self._given
        if self._given is not None:
            return self._given(trained)
        self._followed = list(groups)
        self.note()
        return _second(self._base, [self._options(i) | {"params": groups[i]} for i in groups])

    def follow(self, optimizer: Optimizer) -> None:
        """Copy what the script has changed in the base's groups since its last step."""
        for index, group in zip(self._followed, optimizer.param_groups, strict=False):
            seen = self._seen[index] if index < len(self._seen) else {}
            options, raw = self._options(index), self._base.param_groups[index]
            group.update({key: value for key, value in options.items() if _changed(raw[key], seen.get(key, _MISSING))})

    def note(self) -> None:
        """Remember the base's options: what differs from them at the next step is the script's doing."""
        self._seen = [dict(group) for group in self._base.param_groups]

    def add_fresh(self, optimizer: Optimizer, companion: nn.Module) -> None:
        """Train the parameters that the companion has gained, each as its counterpart is trained."""
        held = {id(p) for p in parameters_of(optimizer)}
        for index, parameters in self._groups(companion, strangers=False).items():
            fresh = [p for p in parameters if id(p) not in held]
            if not fresh:
                continue
            if index in self._followed:
                optimizer.param_groups[self._followed.index(index)]["params"] += fresh
            elif self._given is None:
                optimizer.add_param_group(self._options(index) | {"params": fresh})
                self._followed.append(index)
            else:
                optimizer.add_param_group({"params": fresh})

    def _groups(self, companion: nn.Module, strangers: bool) -> dict[int, list[nn.Parameter]]:
        group_of = {id(p): i for i, group in enumerate(self._base.param_groups) for p in group["params"]}
        theirs = {id(p) for p in self._model.parameters()}
        named = {name: group_of.get(id(p)) for name, p in self._model.named_parameters()}
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in companion.named_parameters():
            index = named.get(name, 0 if strangers else None)
            if parameter.requires_grad and id(parameter) not in theirs and index is not None:
                groups.setdefault(index, []).append(parameter)
        return dict(sorted(groups.items()))

    def _options(self, index: int) -> dict[str, Any]:
        base = self._base.param_groups[index]
        options = {key: value for key, value in base.items() if key not in ("params", "param_names")}
        return options if self._lr_scale == 1 else options | {"lr": base["lr"] * self._lr_scale}


_MISSING = object()


def _changed(value: Any, seen: Any) -> bool:
    return isinstance(value, torch.Tensor) or isinstance(seen, torch.Tensor) or bool(value != seen)


def _inner(base: Optimizer) -> Optimizer:
    """The optimizer that updates the weights where the base wraps one: SAM's, ZeroRedundancyOptimizer's."""
    candidates = (getattr(base, name, None) for name in ("base_optimizer", "optim"))
    return next((inner for inner in candidates if isinstance(inner, Optimizer)), base)


def _second(base: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    if isinstance(base, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS cannot train the companion: it evaluates its objective again and again, and the companion has one "
            "forward a batch; pass companion_optimizer=<callable that builds another optimizer from parameters>"
        )
    base = _inner(base)
    accepted = inspect.signature(type(base).__init__).parameters
    try:
        return type(base)(groups, **{key: value for key, value in base.defaults.items() if key in accepted})
    except Exception as error:
        raise ValueError(
            f"a second {type(base).__name__} for the companion could not be built ({error}); pass "
            "companion_optimizer=<callable that builds one from parameters>"
        ) from error
