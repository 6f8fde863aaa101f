"""Which of a model's own hooks its companion gets: those that belong to the network, none that report to the script."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Hook = Callable[..., Any]
TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
CONSTANTS = (int, float, complex, str, type(None), torch.dtype, torch.device, ModuleType, FunctionType, type)
LIBRARIES = ("torch.", "transformers.")  # transformers collects hidden states by hooks, and some models build on them


def not_copied(model: nn.Module) -> list[tuple[str, Hook]]:
    """Find the hooks that a copy of the model does not get, each with the name of its module.

    A copy gets a hook that torch or transformers put there, a method of the model or of an object that one of its
    modules holds, and a plain function with nothing but constants in its closure, defaults and globals. Functions that
    are found there are not followed.
    """
    held = _held(model)
    return [(name, hook) for name, _, _, hook in _hooks(model) if not _is_copied(hook, held)]


def as_they_are(model: nn.Module) -> dict[int, Hook]:
    """Find the hooks that a deep copy must not copy, as its memo: plain functions and those that the copy will lose."""
    held = _held(model)
    hooks = [hook for *_, hook in _hooks(model)]
    functions = {id(hook): hook for hook in hooks if isinstance(_without_arguments(hook)[0], FunctionType)}
    return functions | {id(hook): hook for hook in hooks if not _is_copied(hook, held)}


def drop(copied: nn.Module, hooks: list[tuple[str, Hook]]) -> None:
    """Take hooks off a copy of the model, and warn that it does without them."""
    dropped = {id(hook) for _, hook in hooks}
    for _, table, key, hook in list(_hooks(copied)):
        if id(hook) in dropped:
            del table[key]
    if hooks:
        named = ", ".join(f"{name!r} ({_name(hook)})" if name else f"the model ({_name(hook)})" for name, hook in hooks)
        warnings.warn(
            f"the companion does not copy these hooks of the model: {named}; where one of them changes what the model "
            "computes, register it on optimizer.companion too",
            UserWarning,
            stacklevel=2,
        )


def differ(model: nn.Module, copied: nn.Module) -> bool:
    """Whether a module of the model has a forward hook that its counterpart in the copy has not."""
    ours = dict(copied.named_modules())
    return any(
        name not in ours or key not in getattr(ours[name], table)
        for name, module in model.named_modules()
        for table in TABLES[:2]
        for key, hook in getattr(module, table).items()
        if not _is_ours(hook)
    )


def hear_only(module: nn.Module) -> None:
    """Let a companion's own forward pre-hooks not change inputs that the model's have changed before."""
    for key, hook in module._forward_pre_hooks.items():
        module._forward_pre_hooks[key] = _Heard(hook)


class _Heard:
    """A forward pre-hook whose result counts in evaluation only: in training the inputs are what the model's made."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        result = self._hook(module, *inputs)
        return None if module.training else result


def _hooks(model: nn.Module) -> Iterator[tuple[str, dict[int, Hook], int, Hook]]:
    for name, module in model.named_modules():
        for table in (vars(module)[table] for table in TABLES):
            yield from ((name, table, key, hook) for key, hook in table.items() if not _is_ours(hook))


def _is_ours(hook: Hook) -> bool:
    return type(getattr(hook, "__self__", hook)).__module__.startswith("dcl_optim.")


def _held(model: nn.Module) -> set[int]:
    """The modules of a model and what they have as attributes: a deep copy binds their methods to its own."""
    return {id(value) for module in model.modules() for value in (module, *vars(module).values())}


def _is_copied(hook: Hook, held: set[int]) -> bool:
    inner, arguments = _without_arguments(hook)
    if isinstance(inner, FunctionType):
        if (inner.__module__ or "").startswith(LIBRARIES):
            return True
        own = _is_constant_function(inner)
    else:
        owner = inner.__self__ if isinstance(inner, MethodType) else inner
        own = id(owner) in held or type(owner).__module__.startswith("torch.")
    return own and all(map(_is_constant, arguments))


def _without_arguments(hook: Any) -> tuple[Any, list[Any]]:
    """Take a functools.partial apart."""
    arguments: list[Any] = []
    while isinstance(hook, functools.partial):
        arguments += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    return hook, arguments


def _is_constant_function(function: FunctionType) -> bool:
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a name in its closure is not set yet
        return False
    names = (*found.nonlocals.values(), *found.globals.values())
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    # A recorder that sets a name of the script begins with `feature = None`.
    return not any(value is None for value in names) and all(map(_is_constant, (*names, *defaults)))


def _is_constant(value: Any) -> bool:
    if isinstance(value, BuiltinFunctionType):  # a function such as math.sqrt, not a method such as a list's append
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, CONSTANTS)


def _name(hook: Hook) -> str:
    inner, _ = _without_arguments(hook)
    return getattr(inner, "__qualname__", type(inner).__qualname__).rpartition("<locals>.")[2]
