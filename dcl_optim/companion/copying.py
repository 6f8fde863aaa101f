"""Making the companion as a deep copy of the model, checking its first prediction, and keeping it as the model is."""

from __future__ import annotations

import copy
import functools
import math
from itertools import chain
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._hooks import is_ours
from dcl_optim._optim import parameters_of, requires_grad
from dcl_optim._torch import ALL_HOOKS, OUR_HOOKS, hooks_of, remove_hook, tensors_of, version_of, warn
from dcl_optim.distributed import DataParallelGroup, is_sharded
from dcl_optim.step import are_close

# Those of torch belong to the layers (spectral_norm); transformers collects hidden states by hooks.
LIBRARIES = ("torch.", "transformers.")
PASS_A_MODULE = (
    "build a second model (shard it in the same way), load the first one's state_dict into it and pass it as companion="
)

# Why a copy is refused: what deepcopy does not follow.
NOT_COPIED = (
    f"a function, a list or a global variable holds that layer, of which no copy is made.\n  Fix: {PASS_A_MODULE}"
)


def build(model: nn.Module, base: Optimizer, given: nn.Module | None) -> nn.Module:
    """Give the companion that the user asked for: a copy of the model, or a module."""
    if given is None:
        return copy_model(model, base)
    if not isinstance(given, nn.Module):
        raise TypeError(f"companion must be a torch.nn.Module or None, got {given!r}")
    theirs = set(map(id, model.parameters()))
    if any(parameter.requires_grad for parameter in given.parameters() if id(parameter) in theirs):
        raise ValueError("companion shares trained parameters with the model; it must have its own")
    return given


def copy_model(model: nn.Module, base: Optimizer) -> nn.Module:
    """Copy a model. The copy shares what the base optimizer does not train, and has no hooks of the script."""
    try:
        copied = copy.deepcopy(model, _not_copied(model, base))
    except Exception as error:
        what = "the companion could not be made as a copy of the model"
        raise RuntimeError(f"{what} ({error}); {PASS_A_MODULE}") from error
    copies = list(copied.modules())
    for module in copies:
        for table, key, hook in hooks_of(module, tuple({*ALL_HOOKS, *OUR_HOOKS})):
            if is_ours(hook) or not _is_copied(hook, copies):
                remove_hook(module, table, key)
    return copied


def _not_copied(model: nn.Module, base: Optimizer) -> dict[int, Any]:
    """What a copy has in place of some of the model's objects, by their id, as deepcopy's memo takes it."""
    modules = list(model.modules())
    hooks = [hook for module in modules for _, _, hook in hooks_of(module, ALL_HOOKS)]
    memo: dict[int, Any] = {id(hook): hook for hook in hooks if not _is_copied(hook, modules)}
    memo |= {id(value): value for module in modules for value in vars(module).values() if _is_kept(value)}
    trained = {id(parameter) for parameter in parameters_of(base) if parameter.requires_grad}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            memo[id(parameter)] = _without_gradient(parameter)
    for tensor in _computed(modules):
        memo[id(tensor)] = tensor.detach().clone()
    return memo


def _is_kept(value: Any) -> bool:
    """Whether a copy has the same object: the process group of SyncBatchNorm, an optimizer."""
    return isinstance(value, Optimizer) or (dist.is_available() and isinstance(value, dist.ProcessGroup))


def _without_gradient(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that is not trained: itself, or one that holds the same values and gets no gradient."""
    if not parameter.requires_grad:
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=False)


def _is_copied(hook: Any, modules: list[nn.Module]) -> bool:
    """Whether a copy of modules has a hook: those of libraries, and methods of the modules, of which it has its own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    module = owner.__module__ if isinstance(owner, FunctionType) else type(owner).__module__
    return str(module).startswith(LIBRARIES) or any(owner is one for one in modules)


def _computed(modules: list[nn.Module]) -> list[Tensor]:
    """The tensors with a graph that an earlier forward has left in attributes, of which torch allows no deep copy."""
    attributes = [value for module in modules for name, value in vars(module).items() if name != "_parameters"]
    return [tensor for tensor in tensors_of(attributes) if tensor.grad_fn is not None]


# ---- the first prediction --------------------------------------------------------------------------------------------


def require_own_leaves(logits: Tensor, model: nn.Module, own: list[Tensor]) -> None:
    """Raise RuntimeError if the companion's backward pass would give a gradient to tensors that are not its own.

    Args:
        logits: of the companion, with their graph.
        model: the model, whose parameters are never the companion's own.
        own: the parameters of the companion and of its optimizer, and the leaves of the forward pass's arguments.
    """
    if any(map(is_sharded, own)):
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    allowed = set(map(id, own)).difference(names)
    for leaf in leaves_of([logits]):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in allowed:
            what = f"the model's {names[id(leaf)]!r}" if id(leaf) in names else f"a tensor of shape {tuple(leaf.shape)}"
            raise RuntimeError(f"the companion would train {what}, which is not its own: {NOT_COPIED}")
    if not logits.requires_grad:
        raise RuntimeError(
            "the companion's logits do not depend on its parameters: was the model's forward replaced by a function "
            f"that holds the model?\n  Fix: {PASS_A_MODULE}"
        )


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The leaves that a backward pass from tensors would give a gradient to."""
    leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def require_equal(logits: Tensor, prediction: Tensor, companion: nn.Module) -> None:
    """Warn if a copy's first prediction differs from the model's logits by more than rounding. Synchronizes."""
    if logits.is_meta or is_sharded(logits):
        return
    dtypes = {logits.dtype, *(p.dtype for p in companion.parameters() if p.is_floating_point())}
    if not logits.is_cpu or torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.bfloat16)  # kernels may add up in any order, in TF32
    rounding = math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))
    if not are_close(logits, prediction, rounding):
        warn(
            "the first prediction of dcl_optim's companion, a copy of the model, is not what the model gave for the "
            "same input, and the difference is in the penalty. Usual reasons: hooks of the model that are not copied "
            "(add them to optimizer.companion too); weights changed since optimizer.companion was asked for (call "
            "reset_companion(), unless they are meant); inputs that the forward changes inside an object; state "
            "outside of modules; random draws from outside of torch's generators"
        )


def written(model: nn.Module) -> list[tuple[int, int]]:
    """How often each of a model's tensors was written to, and where its values are, which ``.data =`` changes."""
    return [(version_of(tensor), tensor.data_ptr()) for tensor in chain(model.parameters(), model.buffers())]


# ---- keeping the companion as the model is ---------------------------------------------------------------------------


class Follower:
    """Brings the companion, at each forward pass, to where the model is: mode, a patched forward, shared values.

    A companion that is no copy follows the mode only. All ranks get the first one's companion.

    Args:
        model: the user's own module.
        companion: the companion.
        base: the model's optimizer.
        is_copy: whether the companion is a copy of the model.
        group: the ranks that train the model together.
    """

    def __init__(
        self, model: nn.Module, companion: nn.Module, base: Optimizer, is_copy: bool, group: DataParallelGroup
    ) -> None:
        self._model = model
        self._companion = companion
        self._is_copy = is_copy
        self._forward = vars(model).get("forward")
        self._base = base
        self._group = group
        self._num_ranks = 0  # at the last forward; 0 before the first
        self._num_groups = len(base.param_groups)
        self._places = _places(base)
        self._modules = [(model, companion)]
        self._shared: list[tuple[Tensor, Tensor]] = []  # what is not trained, of the model and of the companion
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # what is trained, by the id of the model's
        trained = {id(parameter) for parameter in parameters_of(base) if parameter.requires_grad}
        if is_copy:
            self._modules = list(zip(model.modules(), companion.modules(), strict=True))
            for theirs, ours in zip(model.parameters(), companion.parameters(), strict=True):
                if id(theirs) in trained:
                    self._pairs[id(theirs)] = (theirs, ours)
                else:
                    self._shared.append((theirs, ours))
        self._outside = trained - self._pairs.keys()  # what the base trains of other modules
        self._views = [pair for pair in self._shared if pair[0] is not pair[1]]  # of the same memory

    def base_has_changed(self) -> bool:
        """Whether the base optimizer trains a parameter that the companion does not have, or has somewhere else.

        A parameter that is frozen stays as it is in the companion, and learns again when it is unfrozen.
        """
        places = _places(self._base)
        if places == self._places:
            return False
        self._places = places
        if not self._is_copy:
            return True
        trained = [parameter for parameter in parameters_of(self._base) if parameter.requires_grad]
        ids = set(map(id, trained))
        for theirs, ours in self._pairs.values():
            ours.requires_grad_(id(theirs) in ids)
            if theirs.device != ours.device or theirs.dtype != ours.dtype:
                return True
        has_new = not ids <= self._pairs.keys() | self._outside
        return has_new or len(self._base.param_groups) != self._num_groups

    def follow(self) -> None:
        """Bring the companion to where the model is."""
        if self._group.size != self._num_ranks:
            self._give_all_ranks_the_same()
        if self._is_copy and vars(self._model).get("forward") is not self._forward:
            self._follow_forward()
        for theirs, ours in self._modules:
            if ours.training != theirs.training:
                ours.train(theirs.training)
        for theirs_now, ours_now in self._views:
            ours_now.data = theirs_now.data  # of which a script may have assigned another

    def _give_all_ranks_the_same(self) -> None:
        """DistributedDataParallel may come later than the companion."""
        self._num_ranks = self._group.size
        self._group.broadcast(parameter.data for parameter in self._companion.parameters() if parameter.requires_grad)
        self._group.broadcast(self._companion.buffers())

    def _follow_forward(self) -> None:
        """Follow what a library has put in place of the model's forward since, as Accelerate does for autocast."""
        forward = vars(self._model).get("forward")
        self._forward = forward
        if forward is None:
            vars(self._companion).pop("forward", None)
        elif getattr(forward, "__self__", None) is self._model:
            self._companion.forward = MethodType(forward.__func__, self._companion)

    def own_state(self) -> dict[str, Tensor]:
        """The companion's tensors without what it shares with the model."""
        shared = {id(ours) for _, ours in self._shared}
        named = self._companion.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if id(parameter) in shared}
        return {name: tensor for name, tensor in self._companion.state_dict().items() if name not in names}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_num_ranks": 0}


def _places(base: Optimizer) -> list[Any]:
    """What a base optimizer trains, and where it is, without a line of Python for each parameter."""
    trained = list(filter(requires_grad, parameters_of(base)))
    return [len(base.param_groups), list(map(id, trained)), list(map(_place, trained))]


_place = attrgetter("device", "dtype")
