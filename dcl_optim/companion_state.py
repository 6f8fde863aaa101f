"""The companion's optimizer in a checkpoint: its state belongs to parameters by name, whatever order they came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

NAMES = "names_in_companion"


def saved(optimizer: Optimizer, companion: nn.Module) -> dict[str, Any]:
    """The optimizer's state with its parameters' names, where the companion knows them all."""
    state = optimizer.state_dict()
    names = _names(optimizer, companion)
    if names is not None and "param_groups" in state:
        groups = zip(state["param_groups"], names, strict=True)
        state = state | {"param_groups": [group | {NAMES: held} for group, held in groups]}
    return _with_keys(str, state)  # as torch.distributed.checkpoint makes all keys


def check(state: dict[str, Any], optimizer: Optimizer, companion: nn.Module) -> None:
    """Raise ValueError if a saved state is not of this optimizer's groups."""
    sizes = [len(group["params"]) for group in optimizer.state_dict().get("param_groups", [])]
    found = [len(group["params"]) for group in state.get("param_groups", [])]
    if found and sorted(found) == sorted(sizes):
        found = [len(group["params"]) for group in _ordered(state["param_groups"], optimizer, companion)]
    if found != sizes:
        raise ValueError(f"the state of the companion's optimizer has groups of {found} parameters, not {sizes}")


def loadable(state: dict[str, Any], optimizer: Optimizer, companion: nn.Module) -> dict[str, Any]:
    """A saved state with its groups and their parameters in the order in which the optimizer has them."""
    if "param_groups" in state:
        state = state | {"param_groups": _ordered(state["param_groups"], optimizer, companion)}
    return _with_keys(_number, state)


def _ordered(groups: list[dict[str, Any]], optimizer: Optimizer, companion: nn.Module) -> list[dict[str, Any]]:
    names = _names(optimizer, companion)
    plain = [{key: value for key, value in group.items() if key != NAMES} for group in groups]
    if names is None or any(NAMES not in group for group in groups):  # saved before names were
        return plain
    place = {name: (group, index) for group, saved in enumerate(groups) for index, name in enumerate(saved[NAMES])}
    ordered = []
    for held in names:
        places = [place.get(name, (-1, -1)) for name in held]
        origins = {group for group, _ in places}
        if len(origins) != 1 or -1 in origins or len(held) != len(plain[places[0][0]]["params"]):
            raise ValueError(
                f"the state of the companion's optimizer has its parameters in groups of {[g[NAMES] for g in groups]}, "
                f"not {names}"
            )
        origin = plain[places[0][0]]
        ordered.append(origin | {"params": [origin["params"][index] for _, index in places]})
    return ordered


def _names(optimizer: Optimizer, companion: nn.Module) -> list[list[str]] | None:
    """The names of each group's parameters; None if some have none, as in an optimizer that the script handed over."""
    named = {id(parameter): name for name, parameter in companion.named_parameters()}
    groups = [[named.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return None if any("" in group for group in groups) else groups


def _with_keys(convert: Callable[[Any], Any], state: dict[str, Any]) -> dict[str, Any]:
    if "state" not in state:
        return state
    return state | {"state": {convert(key): value for key, value in state["state"].items()}}


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdigit() else key
