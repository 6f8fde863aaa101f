"""The companion's optimizer: a second one of the base's class whose groups mirror the base's, at every step.

What the script changes in the base's groups (a schedule, a momentum cycle) reaches the companion's. What an optimizer
counts in its own groups (Schedule-Free's averages, Prodigy's estimates) stays each one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.wrapper import inner_of, parameters_of

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
NO_OPTIONS = ("params", "param_names")  # what a group holds beside its options


class MirroredOptimizer:
    """Trains the companion as the base optimizer trains the model: class, hyper-parameters, groups, schedule.

    One group for each group of the base, in its order, and in it one slot for each of the base's parameters: the
    companion's own parameter of the same name, or an empty one that never trains where the companion has none of its
    own (frozen and shared, not the model's). So the order in a checkpoint does not depend on what was unfrozen when.
    Parameters of a companion of another architecture, whose names the model does not know, end the first group.

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
        self._seen: list[dict[str, tuple[Any, int]]] = []  # the base's options after its last step, tensors' versions

    def build(self, companion: nn.Module, strangers: bool) -> Optimizer:
        """Build the optimizer over what the companion trains; ``strangers`` lets unknown names follow group 0.

        Raises:
            ValueError: no second optimizer of the base's class can be built, or the given one does not fit.
        """
        groups = self._slots(companion, strangers)
        trained = [p for slots in groups for p in slots if p.requires_grad]
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
        self.note()
        return second(self.base, [self._options(i) | {"params": slots} for i, slots in enumerate(groups)])

    def follow(self, optimizer: Optimizer) -> None:
        """Copy what the script has changed in the base's groups since its last step."""
        if self._given is not None:
            return
        for index, (theirs, ours) in enumerate(zip(self.base.param_groups, optimizer.param_groups, strict=False)):
            seen = self._seen[index] if index < len(self._seen) else {}
            for key, value in theirs.items():
                if key not in NO_OPTIONS and not (key in seen and _is_same(value, *seen[key])):
                    _put(ours, key, self._option(key, value))

    def note(self) -> None:
        """Remember the base's options: what differs from them at the next step is the script's doing."""
        self._seen = [{key: (value, _version(value)) for key, value in g.items()} for g in self.base.param_groups]

    def add_fresh(self, optimizer: Optimizer, companion: nn.Module) -> None:
        """Train the parameters that the companion has gained, each as its counterpart is trained."""
        groups = self._slots(companion, strangers=False)
        if self._given is not None:
            held = {id(p) for p in parameters_of(optimizer)}
            fresh = [p for slots in groups for p in slots if p.requires_grad and id(p) not in held]
            if fresh:
                optimizer.add_param_group({"params": fresh})
            return
        for index, slots in enumerate(groups):
            if index == len(optimizer.param_groups):
                optimizer.add_param_group(self._options(index) | {"params": slots})
                continue
            ours = optimizer.param_groups[index]["params"]
            for place, (old, new) in enumerate(zip(ours, slots, strict=False)):
                if new.requires_grad and _is_empty_slot(old):
                    ours[place] = new
                    if optimizer.state.pop(old, None):  # a constructor made it (SaRA)
                        made = second(self.base, [self._options(index) | {"params": [new]}]).state
                        optimizer.state.update({new: made[new]} if new in made else {})
            ours += slots[len(ours) :]

    def _slots(self, companion: nn.Module, strangers: bool) -> list[list[nn.Parameter]]:
        theirs = {id(p): name for name, p in self._model.named_parameters()}
        own = {name: p for name, p in companion.named_parameters() if p.requires_grad and id(p) not in theirs}
        groups = [
            [own[name] if (name := theirs.get(id(p))) in own else _empty_slot(p) for p in group["params"]]
            for group in self.base.param_groups
        ]
        if strangers:
            known = set(theirs.values())
            groups[0] += [p for name, p in own.items() if name not in known]
        return groups

    def _options(self, index: int) -> dict[str, Any]:
        group = self.base.param_groups[index]
        return {key: self._option(key, value) for key, value in group.items() if key not in NO_OPTIONS}

    def _option(self, key: str, value: Any) -> Any:
        if key == "lr" and self._lr_scale != 1:
            return value * self._lr_scale
        # A tensor that both held, one would count up for the other: timm's Lamb counts its steps in its groups.
        return value.clone() if isinstance(value, torch.Tensor) else value


def _empty_slot(parameter: Tensor) -> nn.Parameter:
    """A parameter without elements and without a gradient, of the shape's length, which optimizers may ask for."""
    sizes = [0] * max(parameter.ndim, 1)
    return nn.Parameter(torch.empty(sizes, dtype=parameter.dtype, device=parameter.device), requires_grad=False)


def _is_empty_slot(parameter: Tensor) -> bool:
    return not parameter.requires_grad and parameter.numel() == 0


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
