"""Which of a model's own hooks its companion gets: those that belong to the network, none that report to the script."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[..., Any]
TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
DECIDED = (FunctionType, MethodType)
PLAIN = (ModuleType, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")


def to_decide(model: nn.Module) -> dict[int, Any]:
    """The hooks that :func:`leave_out` decides on, as a memo by which a deep copy takes them over as they are."""
    return {id(hook): hook for _, _, hook in _hooks(model) if isinstance(_innermost(hook), DECIDED)}


def leave_out(twin: nn.Module, copied: dict[int, Any]) -> None:
    """Drop the hooks through which a deep copy of a model would report to the script, and bind the others to it.

    Args:
        twin: the copy, with the model's own hooks.
        copied: the memo of the deep copy.
    """
    for table, key, hook in list(_hooks(twin)):
        inner = _innermost(hook)
        if isinstance(inner, MethodType) and id(inner.__self__) in copied:
            del copied[id(hook)]
            table[key] = copy.deepcopy(hook, copied)
        elif isinstance(inner, MethodType) or (isinstance(inner, FunctionType) and _reaches_out(hook)):
            del table[key]


def left_out(model: nn.Module, twin: nn.Module) -> list[str]:
    """The modules of a model with a forward hook that their counterparts in its copy have not."""
    ours = dict(twin.named_modules())
    names = []
    for name, module in model.named_modules():
        for table in TABLES[:2]:
            known = vars(ours[name])[table] if name in ours else {}
            if not all(key in known or _is_ours(hook) for key, hook in vars(module)[table].items()):
                names.append(name)
    return names


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


def _hooks(model: nn.Module) -> Iterator[tuple[dict[int, Hook], int, Hook]]:
    for module in model.modules():
        for table in (vars(module)[name] for name in TABLES):
            yield from ((table, key, hook) for key, hook in table.items() if not _is_ours(hook))


def _is_ours(hook: Hook) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("dcl_optim.")


def _innermost(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _reaches_out(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a hook can reach data of the script: an object in its closure, defaults or globals, or a name it sets.

    A hook that cannot has only its arguments to work on, and those are the companion's own.
    """
    if isinstance(value, functools.partial):
        given = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        if value.__module__.startswith("torch."):
            return False
        if any(step.opname in WRITES and step.argval in _outer(value) for step in _steps(value.__code__)):
            return True
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_held(value)]
    elif isinstance(value, tuple):
        given = list(value)
    elif inspect.isroutine(value):  # a method acts on what it is bound to, append on its list
        given = [getattr(value, "__self__", None)]
    elif isinstance(value, Tensor):
        return value.requires_grad
    else:
        return not isinstance(value, PLAIN) and not inspect.isclass(value)
    seen |= {id(value)}
    return any(_reaches_out(item, seen) for item in given if id(item) not in seen)


def _outer(function: FunctionType) -> set[str]:
    """The names that a function and those inside it may set beside their own."""
    written = {step.argval for step in _steps(function.__code__) if step.opname.endswith("_GLOBAL")}
    return written | set(function.__code__.co_freevars)


def _held(function: FunctionType) -> Iterator[Any]:
    """What a function finds outside of itself when it runs."""
    yield from map(_content, function.__closure__ or ())
    for step in _steps(function.__code__):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in function.__globals__:
            yield function.__globals__[step.argval]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return cell


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)
