"""Making the companion from the model, and parameters of its own where the model trains them by now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dcl_optim import hooks
from dcl_optim.tap import drop_inert_hooks


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and what it wraps, from the outside in: DistributedDataParallel, DataParallel, compiled modules."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        yield inner
        parallel = isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        inner = inner.module if parallel else inner._modules.get("_orig_mod")


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside its wrappers."""
    *_, own = layers(model)
    return own


def copy_of(model: nn.Module, share: bool = True) -> nn.Module:
    """Copy a model; frozen parameters are shared with the copy if wanted, trained ones and all buffers are its own.

    Hooks that could report to the script are left out, see :mod:`dcl_optim.hooks`, and a warning names them.

    Raises:
        RuntimeError: the model cannot be deep-copied (weight norm and other parametrisations).
    """
    shared: dict[int, Any] = {
        id(parameter): parameter for parameter in model.parameters() if share and not parameter.requires_grad
    }
    dropped = hooks.not_copied(model)
    shared |= {id(held): held for held in _not_to_copy(model)} | hooks.as_they_are(model)
    try:
        twin = copy.deepcopy(model, shared)
    except Exception as error:
        raise RuntimeError(
            f"the companion could not be made as a copy of the model ({error}); build a second model yourself, load "
            "the first one's state_dict into it (shard it in the same way if the model is sharded) and pass it as "
            "companion="
        ) from error
    drop_inert_hooks(twin)
    hooks.drop(twin, dropped)
    return twin


def _not_to_copy(model: nn.Module) -> Iterator[Any]:
    """What modules hold and no copy may have of its own: process groups (SyncBatchNorm), optimizers."""
    kinds: tuple[Any, ...] = (Optimizer, dist.ProcessGroup) if dist.is_available() else (Optimizer,)
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, kinds))


def build(
    model: nn.Module,
    companion: nn.Module | Callable[[], nn.Module] | None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Give the companion that the user asked for: a copy of the model, a module, or what a callable builds.

    Args:
        model: the model.
        companion: None for a copy, a module, or a callable that builds one.
        device: where it is to be; None for the model's device, unless either is spread over several.
        dtype: what its floating-point tensors are to be; None leaves them. Nothing of another place is shared.

    Raises:
        TypeError: what was given or built is no module.
        ValueError: it shares trained parameters with the model, or frozen ones that would be moved.
    """
    if companion is None:
        return move(copy_of(model, shares(device, dtype)), device, dtype)
    built = companion if isinstance(companion, nn.Module) or not callable(companion) else companion()
    if not isinstance(built, nn.Module):
        raise TypeError(f"companion must be a module, a callable that builds one, or None, got {built!r}")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if any(id(parameter) in trained for parameter in built.parameters()):
        raise ValueError("companion shares trained parameters with the model; it must have its own")
    place = common_device(model)
    if device is None and place is not None and common_device(built) is not None:
        device = place
    common = {id(parameter) for parameter in model.parameters()}
    for parameter in (parameter for parameter in built.parameters() if id(parameter) in common):
        if (device or parameter.device, dtype or parameter.dtype) != (parameter.device, parameter.dtype):
            raise ValueError(
                "companion shares frozen parameters with the model, which companion_device= or companion_dtype= would "
                "move for both; build it with parameters of its own"
            )
    return move(built, device, dtype)


def shares(device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether a copy may share frozen parameters: not one of its own device or dtype."""
    return device is None and dtype is None


def common_device(module: nn.Module) -> torch.device | None:
    """The device of all of a module's parameters; None where it is spread over several, as the script has seen to."""
    devices = {parameter.device for parameter in module.parameters()}
    return devices.pop() if len(devices) == 1 else None


def move(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """Move a companion to its own device and dtype, where it has them."""
    return module if device is None and dtype is None else module.to(device=device, dtype=dtype)


def copy_unfrozen(model: nn.Module, twin: nn.Module) -> None:
    """Replace parameters that the twin still shares although the model trains them by now."""
    copies: dict[int, nn.Parameter] = {}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for module in twin.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in trained:
                setattr(module, name, copies.setdefault(id(parameter), _own(parameter)))


def _own(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
