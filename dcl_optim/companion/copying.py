"""Making the companion as a deep copy of the model, and checking its first prediction."""

from __future__ import annotations

import copy
import functools
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.progress import are_close
from dcl_optim.pytorch.internals import hooks_of, tensors_of, version_of, warn
from dcl_optim.pytorch.outputs import leaves_of
from dcl_optim.pytorch.parameters import parameters_of, requires_grad
from dcl_optim.pytorch.ranks import any_sharded

# Those of torch belong to the layers (spectral_norm); transformers collects hidden states by hooks.
LIBRARIES = ("torch.", "transformers.")
KEPT = (Optimizer, getattr(dist, "ProcessGroup", Optimizer))  # which a copy has too: SyncBatchNorm's group
PASS_A_MODULE = (
    "build a second model (shard it in the same way), load the first one's state_dict into it and pass it as companion="
)

ROUNDING = 0.1  # of half precision and TF32, whose kernels may add up in any order

# Why a copy is refused: what deepcopy does not follow.
NOT_COPIED = (
    "a function, a list, a global variable or torch.jit.script holds that layer, of which no copy is made.\n"
    f"  Fix: {PASS_A_MODULE}"
)


def build(model: nn.Module, base: Optimizer, given: nn.Module | None) -> nn.Module:
    """Give the companion that the user asked for: a module, or a copy of the model.

    The copy shares what the base optimizer does not train, and has no hooks of the script.
    """
    if given is not None:
        if not isinstance(given, nn.Module):
            raise TypeError(f"companion must be a torch.nn.Module or None, got {given!r}")
        if any(map(requires_grad, set(model.parameters()).intersection(given.parameters()))):
            raise ValueError("companion shares trained parameters with the model; it must have its own")
        given.zero_grad()  # of what the script has trained it by
        return given
    try:
        copied = copy.deepcopy(model, _not_copied(model, base))
    except Exception as error:
        what = "the companion could not be made as a copy of the model"
        raise RuntimeError(f"{what} ({error}); {PASS_A_MODULE}") from error
    if list(dict(copied.named_parameters())) != list(dict(model.named_parameters())):
        raise ValueError(f"the parameters of the model's copy have other names or another order; {PASS_A_MODULE}")
    copies = list(copied.modules())
    for module in copies:
        for table, key, hook in hooks_of(module):
            if not _is_copied(hook, copies):
                del table[key]
    return copied


def _not_copied(model: nn.Module, base: Optimizer) -> dict[int, Any]:
    """What a copy has in place of some of the model's objects, by their id, as deepcopy's memo takes it."""
    modules = list(model.modules())
    hooks = [hook for module in modules for _, _, hook in hooks_of(module)]
    attributes = [value for module in modules for value in vars(module).values()]
    memo: dict[int, Any] = {id(hook): hook for hook in hooks if not _is_copied(hook, modules)}
    memo |= {id(value): value for value in attributes if isinstance(value, KEPT)}
    for tensor in tensors_of(attributes):
        if tensor.grad_fn is not None:  # torch copies no tensor with a graph
            memo[id(tensor)] = tensor.detach().clone()
    for parameter in set(model.parameters()).difference(filter(requires_grad, parameters_of(base))):
        memo[id(parameter)] = parameter
        if parameter.requires_grad:  # the same values, which get no gradient
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return memo


def _is_copied(hook: Any, modules: list[nn.Module]) -> bool:
    """Whether a copy of modules has a hook: those of libraries, and methods of the modules, of which it has its own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    return str(getattr(owner, "__module__", "")).startswith(LIBRARIES) or any(owner is one for one in modules)


# ---- the first prediction --------------------------------------------------------------------------------------------


def require_own_leaves(logits: Tensor, model: nn.Module, base: Optimizer, companion: nn.Module) -> None:
    """Raise RuntimeError if the companion's backward pass would give a gradient to tensors that are not its own.

    Args:
        logits: of the companion, with their graph.
        model: the model, whose parameters are never the companion's own.
        base: its optimizer. If it trains tensors that are no parameters, leaves that are none count.
        companion: the companion.
    """
    own = set(companion.parameters())
    if any_sharded(list(own)):
        return
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    allowed = own.difference(names)
    kinds = (nn.Parameter, *map(type, parameters_of(base)))
    for leaf in leaves_of([logits]):
        if isinstance(leaf, kinds) and leaf not in allowed:
            what = f"the model's {names[leaf]!r}" if leaf in names else f"a tensor of shape {tuple(leaf.shape)}"
            raise RuntimeError(f"the companion would train {what}, which is not its own: {NOT_COPIED}")
    if not logits.requires_grad:
        raise RuntimeError(
            "the companion's logits do not depend on its parameters: was the model's forward replaced by a function "
            f"that holds the model?\n  Fix: {PASS_A_MODULE}"
        )


def require_equal(logits: Tensor, prediction: Tensor) -> None:
    """Warn if a copy's first prediction differs from the model's logits by more than rounding. Synchronizes."""
    if not are_close(logits, prediction, ROUNDING):
        warn(
            "the first prediction of dcl_optim's companion, a copy of the model, is not what the model gave for the "
            "same input, and the difference is in the penalty. Usual reasons: hooks of the model that are not copied "
            "(add them to optimizer.companion too); weights changed since optimizer.companion was asked for (call "
            "reset_companion(), unless they are meant); inputs that the forward changes inside an object; state "
            "outside of modules; random draws from outside of torch's generators"
        )


def written(model: nn.Module) -> list[Any]:
    """How often each of a model's tensors was written to, where its values are, and their sum. Synchronizes.

    ``.data =`` changes where they are alone, and writing to ``.data`` their sum alone. It is a string, in which nan
    equals nan.
    """
    found: list[Any] = []
    for tensor in chain(model.parameters(), model.buffers()):
        found += version_of(tensor), tensor.data_ptr()
        if type(tensor.data) is Tensor and tensor.dtype.itemsize > 1:  # which has a sum
            found.append(str(tensor.data.sum().item()))
    return found
