"""Making the companion: a deep copy of the model, what it shares with it, and which of the model's hooks it gets."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._hooks import is_ours
from dcl_optim._torch import AFTER_FORWARD, ALL_HOOKS, BEFORE_FORWARD, OUR_HOOKS, hooks_of, remove_hook, warn
from dcl_optim.distributed import is_sharded

# transformers collects hidden states by hooks, and some models build on them; a companion may be copied too.
LIBRARIES = ("torch.", "transformers.", __name__)


def build(model: nn.Module, companion: nn.Module | Callable[[], nn.Module] | None, is_called: bool) -> nn.Module:
    """Give the companion that the user asked for: a copy of the model, a module, or what a callable builds."""
    if companion is None:
        return copy_model(model, is_called)
    if isinstance(companion, type):
        try:
            inspect.signature(companion).bind()
        except TypeError:
            name = companion.__name__
            raise TypeError(f"companion={name} cannot be called without arguments; pass lambda: {name}(...)") from None
    built = companion if isinstance(companion, nn.Module) or not callable(companion) else companion()
    if not isinstance(built, nn.Module):
        raise TypeError(f"companion must be a module, a callable that builds one, or None, got {built!r}")
    theirs = set(map(id, model.parameters()))
    if any(p.requires_grad for p in built.parameters() if id(p) in theirs):
        raise ValueError("companion shares trained parameters with the model; it must have its own")
    return built


def copy_model(model: nn.Module, is_called: bool = True) -> nn.Module:
    """Copy a model with the hooks of libraries and of the model's objects; a warning names the others.

    ``is_called``: the script calls the model itself, so the copy gets the inputs that its pre-hooks have made.
    """
    modules = list(model.named_modules())
    hooks = [(name, key, hook) for name, module in modules for _, key, hook in hooks_of(module, ALL_HOOKS)]
    held = {id(value) for _, module in modules for value in (module, *vars(module).values())}
    foreign = [item for item in hooks if not is_ours(item[2]) and not _is_of_library(item[2])]
    pre_hooks = {key for _, key, _ in hooks_of(model, BEFORE_FORWARD)} if is_called else set()
    after_ours = _after_ours(model)
    keys = {(name, key) for name, key, hook in foreign if id(_owner(hook)) not in held}
    keys |= {("", key) for key in after_ours}
    outside = {("", key) for key in pre_hooks | after_ours}  # nothing is lost: these are not in what is compared
    dropped = [item for item in foreign if item[:2] in keys - outside]
    as_they_are: list[Any] = [p for p in model.parameters() if not p.requires_grad]
    as_they_are += [hook for _, _, hook in dropped]
    as_they_are += [hook for _, _, hook in hooks if isinstance(_function_of(hook), FunctionType)]
    # A copy has the same process group (SyncBatchNorm) and optimizer, not copies of them.
    kinds: tuple[Any, ...] = (Optimizer, dist.ProcessGroup) if dist.is_available() else (Optimizer,)
    as_they_are += [value for _, module in modules for value in vars(module).values() if isinstance(value, kinds)]
    memo = {id(value): value for value in as_they_are}
    memo |= {id(tensor): tensor.detach().clone() for tensor in _computed(model)}
    try:
        copied = copy.deepcopy(model, memo)
        for (name, _), (found, _) in zip(model.named_parameters(), copied.named_parameters(), strict=False):
            if found != name:
                raise ValueError(f"its copy's parameter {name!r} is called {found!r}, as in a Keras model")
    except Exception as error:
        raise RuntimeError(
            f"the companion could not be made as a copy of the model ({error}); build a second model (shard it in the "
            "same way), load the first one's state_dict into it and pass it as companion="
        ) from error
    for name, module in copied.named_modules():
        for table, key, hook in hooks_of(module, tuple({*ALL_HOOKS, *OUR_HOOKS})):
            if (name, key) in keys or is_ours(hook):
                remove_hook(module, table, key)
            elif is_called and not name and table is vars(module)[BEFORE_FORWARD[0]]:
                table[key] = _WithoutResult(hook)
    if dropped:
        places = [(f"{name!r}" if name else "the model", _function_of(hook)) for name, _, hook in dropped]
        warn(
            "the companion does not copy these hooks of the model: "
            + ", ".join(f"{place} ({_name(hook)})" for place, hook in places)
            + "; where one of them changes what the model computes, register it on optimizer.companion too"
        )
    return copied


class _WithoutResult:
    """A pre-hook of the model itself in its copy, which gets the inputs that the model's own pre-hook has made."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        self._hook(*arguments)


def _computed(model: nn.Module) -> list[Tensor]:
    """The tensors with a graph that an earlier forward has left in attributes, of which torch allows no deep copy."""
    held = [value for module in model.modules() for name, value in vars(module).items() if name != "_parameters"]
    held += [item for value in held if isinstance(value, (list, tuple)) for item in value]
    held += [item for value in held if isinstance(value, dict) for item in value.values()]
    return [value for value in held if isinstance(value, Tensor) and value.grad_fn is not None]


def _after_ours(model: nn.Module) -> set[int]:
    """The forward hooks of the model itself that come after ours: they change the logits behind the penalty."""
    found = [(key, is_ours(hook)) for _, key, hook in hooks_of(model, AFTER_FORWARD)]
    last = max((index for index, (_, ours) in enumerate(found) if ours), default=len(found))
    return {key for key, _ in found[last + 1 :]}


def _owner(hook: Any) -> Any:
    """The object whose method a hook is, or the hook itself."""
    inner = _function_of(hook)
    return getattr(inner, "__self__", inner)


def _is_of_library(hook: Any) -> bool:
    owner = _owner(hook)
    return str((owner if isinstance(owner, FunctionType) else type(owner)).__module__).startswith(LIBRARIES)


def _function_of(hook: Any) -> Any:
    """What is inside functools.partial."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]


def has_other_hooks(model: nn.Module, companion: nn.Module) -> bool:
    """Whether a module of the model has a forward hook that its counterpart in the copy has not."""
    return not _hook_keys(model) <= _hook_keys(companion)


def _hook_keys(network: nn.Module) -> set[tuple[str, int]]:
    modules = network.named_modules()
    return {(name, key) for name, module in modules for _, key, hook in hooks_of(module) if not is_ours(hook)}


def unshare(companion: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Replace parameters that the companion shares by copies, which train."""
    copies = {id(parameter): nn.Parameter(parameter.detach().clone()) for parameter in parameters}
    for module in companion.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in copies:
                setattr(module, name, copies[id(parameter)])


def require_equal(logits: Tensor, forecast: Tensor, companion: nn.Module) -> None:
    """Warn if a copy's first forecast differs from the model's logits by more than rounding. Synchronizes."""
    if logits.is_meta or is_sharded(logits):
        return
    dtypes = {logits.dtype, *(p.dtype for p in companion.parameters() if p.is_floating_point())}
    if not logits.is_cpu or torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.bfloat16)  # kernels may add up in any order, in TF32
    rounding = math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))
    same = (logits == forecast) | (logits.isnan() & forecast.isnan())
    wide = torch.promote_types(logits.dtype, torch.float32)
    difference = (logits - forecast).masked_fill(same, 0).to(wide).norm()
    size = logits.masked_fill(~logits.isfinite(), 0).to(wide).norm()
    apart, allowed = torch.stack([difference, size]).tolist()
    if not apart <= allowed * rounding:
        warn(
            "the first forecast of dcl_optim's companion, a copy of the model, is not what the model gave for the same "
            f"input: it is {apart / allowed if allowed else math.inf:.1%} of the logits' size away, which is in the "
            "penalty. Usual reasons: hooks of the model that are not copied (add them to optimizer.companion too); "
            "weights changed since optimizer.companion was asked for (call reset_companion()); inputs that the forward "
            "changes inside an object; state outside of modules; random draws from outside of torch's generators"
        )
