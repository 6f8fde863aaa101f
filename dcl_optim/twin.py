"""Making the companion from the model and keeping its structure in step with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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

    Hooks that could report to the script are left out, see :mod:`dcl_optim.hooks`.

    Raises:
        RuntimeError: the model cannot be deep-copied (weight norm and other parametrisations).
    """
    shared: dict[int, Any] = {
        id(parameter): parameter for parameter in model.parameters() if share and not parameter.requires_grad
    }
    shared |= {id(group): group for group in _process_groups(model)} | hooks.to_decide(model)
    try:
        twin = copy.deepcopy(model, shared)
    except Exception as error:
        raise RuntimeError(
            f"the companion could not be made as a copy of the model ({error}); build a second model yourself, load "
            "the first one's state_dict into it (shard it in the same way if the model is sharded) and pass it as "
            "companion="
        ) from error
    drop_inert_hooks(twin)
    hooks.leave_out(twin, shared)
    return twin


def _process_groups(model: nn.Module) -> Iterator[Any]:
    """Process groups that modules hold (SyncBatchNorm), which no copy may have of its own."""
    if dist.is_available():
        for module in model.modules():
            yield from (value for value in vars(module).values() if isinstance(value, dist.ProcessGroup))


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
        device: where it is to be; None leaves it where it is.
        dtype: what its floating-point tensors are to be; None leaves them. Nothing of another place is shared.

    Raises:
        TypeError: what was given or built is no module.
        ValueError: it shares trained parameters with the model.
    """
    if companion is None:
        return move(copy_of(model, share=device is None and dtype is None), device, dtype)
    built = companion if isinstance(companion, nn.Module) or not callable(companion) else companion()
    if not isinstance(built, nn.Module):
        raise TypeError(f"companion must be a module, a callable that builds one, or None, got {built!r}")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if any(id(parameter) in trained for parameter in built.parameters()):
        raise ValueError("companion shares trained parameters with the model; it must have its own")
    return move(built, device, dtype)


def move(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """Move a companion to its own device and dtype, where it has them."""
    return module if device is None and dtype is None else module.to(device=device, dtype=dtype)


def copy_new_modules(model: nn.Module, twin: nn.Module) -> None:
    """Copy modules and parameters that the model has gained since its twin was made."""
    children = dict(twin.named_children())
    for name, module in model.named_children():
        if name in children:
            copy_new_modules(module, children[name])
        else:
            setattr(twin, name, copy_of(module))
    known = dict(twin.named_parameters(recurse=False))
    for name, parameter in model.named_parameters(recurse=False):
        if name not in known:
            twin.register_parameter(name, _own(parameter))


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
