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

from dcl_optim.wrapper import inner_of, parameters_of

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
NO_OPTIONS = ("params", "param_names")  # what a group holds beside its options


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

    Attributes:
        base: the optimizer of the model.
    """

    def __init__(self, base: Optimizer, model: nn.Module, lr_scale: float, given: Optimizer | MakeOptimizer | None):
        self.base, self._model, self._lr_scale, self._given = base, model, lr_scale, given
        self._followed: list[int] = []  # for each of our groups the base's group it mirrors
        self._seen: list[dict[str, tuple[Any, int]]] = []  # the base's options after its last step, tensors' versions

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
            built = self._given(trained) if callable(self._given) else self._given
            if not isinstance(built, Optimizer):
                raise TypeError(
                    f"companion_optimizer must be an optimizer, a callable that builds one, or None, got {built!r}"
                )
            return built
        self._followed = list(groups)
        self.note()
        return second(self.base, [self._options(i) | {"params": groups[i]} for i in groups])

    def follow(self, optimizer: Optimizer) -> None:
        """Copy what the script has changed in the base's groups since its last step."""
        for index, group in zip(self._followed, optimizer.param_groups, strict=False):
            seen = self._seen[index] if index < len(self._seen) else {}
            for key, value in self.base.param_groups[index].items():
                if key not in NO_OPTIONS and not (key in seen and _is_same(value, *seen[key])):
                    _put(group, key, self._option(key, value))

    def note(self) -> None:
        """Remember the base's options: what differs from them at the next step is the script's doing."""
        self._seen = [{key: (value, _version(value)) for key, value in g.items()} for g in self.base.param_groups]

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
        group_of = {id(p): i for i, group in enumerate(self.base.param_groups) for p in group["params"]}
        theirs = {id(p) for p in self._model.parameters()}
        named = {name: group_of.get(id(p)) for name, p in self._model.named_parameters()}
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in companion.named_parameters():
            index = named.get(name, 0 if strangers else None)
            if parameter.requires_grad and id(parameter) not in theirs and index is not None:
                groups.setdefault(index, []).append(parameter)
        return dict(sorted(groups.items()))

    def _options(self, index: int) -> dict[str, Any]:
        group = self.base.param_groups[index]
        return {key: self._option(key, value) for key, value in group.items() if key not in NO_OPTIONS}

    def _option(self, key: str, value: Any) -> Any:
        if key == "lr" and self._lr_scale != 1:
            return value * self._lr_scale
        # A tensor that both held, one would count up for the other: timm's Lamb counts its steps in its groups.
        return value.clone() if isinstance(value, torch.Tensor) else value


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _is_same(value: Any, seen: Any, version: int) -> bool:
    """Whether an option is untouched; of a tensor without a look at its values, which would synchronise a device."""
    if isinstance(value, torch.Tensor) or isinstance(seen, torch.Tensor):
        return value is seen and _version(value) == version
    return bool(value == seen)


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
        group[key].copy_(value)  # in place: a captured or compiled step holds on to the tensor
    else:
        group[key] = value


def _is_setting(value: Any) -> bool:
    """Whether an attribute may be what a constructor was given: some optimizers keep part of it beside ``defaults``."""
    if isinstance(value, tuple):
        return all(_is_setting(item) for item in value)
    if isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
        return True
    return inspect.isroutine(value) or inspect.isclass(value)


def second(base: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer of the base's class and settings over other groups.

    Raises:
        ValueError: there can be none, or none that steps without a closure.
    """
    if isinstance(base, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS cannot train the companion: it evaluates its objective again and again, and the companion has one "
            "forward a batch; pass companion_optimizer=<callable that builds another optimizer from parameters>"
        )
    base = inner_of(base)
    closure = inspect.signature(type(base).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(base).__name__} steps with a closure only, and the companion has none; pass "
            "companion_optimizer=<callable that builds another optimizer from parameters>"
        )
    accepted = inspect.signature(type(base).__init__).parameters
    known = {key: value for key, value in vars(base).items() if _is_setting(value)} | base.defaults
    try:
        return type(base)(groups, **{key: value for key, value in known.items() if key in accepted})
    except Exception as error:
        raise ValueError(
            f"a second {type(base).__name__} for the companion could not be built ({error}); pass "
            "companion_optimizer=<callable that builds one from parameters>"
        ) from error
