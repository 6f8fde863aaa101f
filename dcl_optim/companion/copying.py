"""Making the companion: a deep copy of the model, what it shares with it, and which of the model's hooks it gets."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._hooks import is_ours
from dcl_optim._torch import AFTER_FORWARD, ALL_HOOKS, OUR_HOOKS, forward_pre_hooks, hooks_of, remove_hook, warn
from dcl_optim.distributed import is_fully_sharded, is_sharded

CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, ModuleType, FunctionType, type)
LIBRARIES = ("torch.", "transformers.")  # transformers collects hidden states by hooks, and some models build on them


CANNOT_COPY = (
    "the companion could not be made as a copy of the model ({}); build a second model yourself, load the first one's "
    "state_dict into it (shard it in the same way if the model is sharded) and pass it as companion="
)


def check_model(model: nn.Module) -> None:
    """Refuse a model that is known to allow no copy."""
    if is_fully_sharded(model):
        raise RuntimeError(CANNOT_COPY.format("fully_shard does not support deepcopy"))


def build(model: nn.Module, companion: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """Give the companion that the user asked for: a copy of the model, a module, or what a callable builds."""
    if companion is None:
        return copy_model(model)
    built = companion if isinstance(companion, nn.Module) or not callable(companion) else companion()
    if not isinstance(built, nn.Module):
        raise TypeError(f"companion must be a module, a callable that builds one, or None, got {built!r}")
    theirs = set(map(id, model.parameters()))
    if any(p.requires_grad for p in built.parameters() if id(p) in theirs):
        raise ValueError("companion shares trained parameters with the model; it must have its own")
    return built


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, without the hooks through which the copy could reach the script's data; a warning names those.

    Trained parameters and all buffers are the copy's own.
    """
    dropped = _not_copied_hooks(model)
    as_they_are: list[Any] = [p for p in model.parameters() if not p.requires_grad]
    as_they_are += [hook for _, hook in dropped]
    # A copy has the same process group (SyncBatchNorm) and optimizer, not copies of them.
    kinds: tuple[Any, ...] = (Optimizer, dist.ProcessGroup) if dist.is_available() else (Optimizer,)
    for module in model.modules():
        hooks = [hook for _, _, hook in hooks_of(module, ALL_HOOKS)]
        as_they_are += [hook for hook in hooks if isinstance(_split_partial(hook)[0], FunctionType)]
        as_they_are += [value for value in vars(module).values() if isinstance(value, kinds)]
    memo = {id(value): value for value in as_they_are}
    memo |= {id(tensor): tensor.detach().clone() for tensor in _computed(model)}
    try:
        copied = copy.deepcopy(model, memo)
        _check_names(model, copied)
    except Exception as error:
        raise RuntimeError(CANNOT_COPY.format(error)) from error
    _drop_later_hooks(model, copied)
    _drop(copied, dropped)
    for module in copied.modules():
        for table, key, hook in list(hooks_of(module, OUR_HOOKS)):
            if is_ours(hook):
                remove_hook(module, table, key)
    return copied


def _check_names(model: nn.Module, copied: nn.Module) -> None:
    for (name, _), (found, _) in zip(model.named_parameters(), copied.named_parameters(), strict=False):
        if found != name:
            raise ValueError(f"its copy's parameter {name!r} is called {found!r}, as in a Keras model")


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """The tensors with a graph that an earlier forward has left in attributes, of which torch allows no deep copy."""
    for module in model.modules():
        for name, value in vars(module).items():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            if name != "_parameters":
                yield from (item for item in items if isinstance(item, Tensor) and item.grad_fn is not None)


def _drop_later_hooks(model: nn.Module, copied: nn.Module) -> None:
    """Remove forward hooks of the model itself that come after ours: they change the logits behind the penalty."""
    found = list(hooks_of(model, AFTER_FORWARD))
    ours = [index for index, (_, _, hook) in enumerate(found) if is_ours(hook)]
    later = {key for _, key, _ in found[ours[-1] + 1 :]} if ours else set()
    for table, key, _ in list(hooks_of(copied, AFTER_FORWARD)):
        if key in later:
            remove_hook(copied, table, key)


def _not_copied_hooks(model: nn.Module) -> list[tuple[str, Any]]:
    """Find the hooks that a copy of the model does not get, each with the name of its module.

    A copy gets a hook that torch or transformers put there, a method of the model or of an object that one of its
    modules holds, and a plain function with nothing but constants in its closure, defaults and globals. Functions that
    are found there are not followed.
    """
    held = {id(value) for module in model.modules() for value in (module, *vars(module).values())}
    hooks = [(name, hook) for name, module in model.named_modules() for _, _, hook in hooks_of(module, ALL_HOOKS)]
    return [(name, hook) for name, hook in hooks if not is_ours(hook) and not _is_copied(hook, held)]


def _is_copied(hook: Any, held: set[int]) -> bool:
    inner, arguments = _split_partial(hook)
    if isinstance(inner, FunctionType):
        if (inner.__module__ or "").startswith(LIBRARIES):
            return True
        belongs = _is_constant_function(inner)
    else:
        owner = inner.__self__ if isinstance(inner, MethodType) else inner
        belongs = id(owner) in held or type(owner).__module__.startswith(("torch.", __name__))
    return belongs and all(map(_is_constant, arguments))


def _split_partial(hook: Any) -> tuple[Any, list[Any]]:
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


def _drop(copied: nn.Module, hooks: list[tuple[str, Any]]) -> None:
    """Take hooks off a copy of the model, and warn that it does without them."""
    dropped = {id(hook) for _, hook in hooks}
    for module in copied.modules():
        for table, key, hook in hooks_of(module, ALL_HOOKS):
            if id(hook) in dropped:
                remove_hook(module, table, key)
    if hooks:
        named = ", ".join(f"{name!r} ({_name(hook)})" if name else f"the model ({_name(hook)})" for name, hook in hooks)
        warn(
            f"the companion does not copy these hooks of the model: {named}; where one of them changes what the model "
            "computes, register it on optimizer.companion too"
        )


def _name(hook: Any) -> str:
    inner, _ = _split_partial(hook)
    return getattr(inner, "__qualname__", type(inner).__qualname__).rpartition("<locals>.")[2]


def has_other_hooks(model: nn.Module, companion: nn.Module) -> bool:
    """Whether a module of the model has a forward hook that its counterpart in the copy has not."""
    ours = dict(companion.named_modules())
    for name, module in model.named_modules():
        keys = {key for _, key, hook in hooks_of(module) if not is_ours(hook)}
        if name not in ours or not keys <= {key for _, key, _ in hooks_of(ours[name])}:
            return True
    return False


def ignore_inputs_of_pre_hooks(module: nn.Module) -> list[InputsOfScript]:
    """Let a companion's own forward pre-hooks not change, where ``ignored``, inputs that the model's changed before."""
    table = forward_pre_hooks(module)
    table.update({key: InputsOfScript(hook) for key, hook in table.items()})
    return list(table.values())


class InputsOfScript:
    """A forward pre-hook whose result counts where the script calls the companion, not on the model's inputs."""

    ignored = False

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        result = self._hook(module, *inputs)
        return None if self.ignored else result


def unshare(companion: nn.Module, parameters: dict[int, bool]) -> None:
    """Replace parameters that the companion shares, by id, by copies; the values say whether these are trained."""
    copies: dict[int, nn.Parameter] = {}
    for module in companion.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in parameters:
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameters[id(parameter)])
                setattr(module, name, copies[id(parameter)])


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each layer back into its own mode afterwards."""
    training = [layer for layer in module.modules() if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


def require_equal(logits: Tensor, forecast: Tensor, companion: nn.Module) -> None:
    """Warn if a copy's first forecast differs from the model's logits by more than rounding. Synchronizes."""
    if logits.is_meta or is_sharded(logits):
        return
    both_nan = logits.isnan() & forecast.isnan()
    wide = torch.promote_types(logits.dtype, torch.float32)
    difference = (logits - forecast).masked_fill((logits == forecast) | both_nan, 0).to(wide).norm()
    size = logits.masked_fill(~logits.isfinite(), 0).to(wide).norm()
    apart, allowed = torch.stack([difference, size]).tolist()
    if apart <= allowed * _tolerance(logits, companion):
        return
    warn(
        "the first forecast of dcl_optim's companion, a copy of the model, is not what the model gave for the same "
        f"input: it is {apart / allowed if allowed else math.inf:.1%} of the logits' size away. Whatever makes the "
        "difference is in the penalty. Usual reasons: inputs that the forward changes inside an object that is no "
        "tuple, list, dict or dataclass (clone them first); hooks of the model that are not copied (register them on "
        "optimizer.companion too); state outside of modules, which both networks change; random draws from outside of "
        "torch's generators; weights that were loaded or changed since optimizer.companion was asked for (call "
        "optimizer.reset_companion())"
    )


def _tolerance(logits: Tensor, companion: nn.Module) -> float:
    """The square root of the coarsest rounding that takes part; on a GPU kernels may add up in any order, in TF32."""
    dtypes = {logits.dtype, *(p.dtype for p in companion.parameters() if p.is_floating_point())}
    if not logits.is_cpu or torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.bfloat16)
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))
