"""Every private torch or CPython API that the package uses, with the reason; tried on torch 2.6 and 2.15."""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.pytorch.parameters import parameters_of, requires_grad

F = TypeVar("F", bound=Callable[..., Any])

# The number of the backward pass that runs in this thread, -1 outside of one. Tells a hook two backward passes apart,
# and a forward hook that it runs inside a backward pass (activation checkpointing recomputes there).
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# Whether the node that runs now may run another backward pass: no `inputs` were named for this one, and none is asked
# for by `autograd.grad`. Torch's reentrant checkpoints, whose parameters are in no graph, ask the same.
_fills_all_leaves: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid

# Whether a node is going to run in the backward pass that runs in this thread. Raises for a leaf that `autograd.grad`
# was asked for, which has a gradient then.
_is_going_to_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def reaches_parameters(nodes: Iterable[tuple[Any, int]] | None, optimizer: Optimizer) -> bool:
    """Whether the backward pass that runs now brings gradients to parameters of an optimizer through these nodes."""
    if nodes is None or current_backward() == -1:  # compiled autograd
        return True
    if not any(_gets_gradient(node) for node, _ in nodes):
        return False
    if _fills_all_leaves():
        return True
    trained = filter(requires_grad, parameters_of(optimizer))
    return any(_gets_gradient(torch.autograd.graph.get_gradient_edge(parameter).node) for parameter in trained)


def _gets_gradient(node: Any) -> bool:
    try:
        return node is not None and _is_going_to_run(node)
    except RuntimeError:  # a leaf whose gradient is asked for
        return True


# Calls a function back when the backward pass that runs now has ended (public since torch 2.13).
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def is_recorded() -> bool:
    """Whether the forward pass is recorded (torch.jit.trace, ONNX, torch.export) or transformed by torch.func."""
    recorded = torch._C._is_tracing() or torch.compiler._is_compiling_flag
    return recorded or torch._C._functorch.peek_interpreter_stack() is not None


def in_compiled_autograd() -> bool:
    """Whether the backward pass that runs now was compiled, by torch.compile with its option compiled_autograd."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


REPLICA = "_is_replica"  # an attribute of the copies that nn.DataParallel makes of its module in each forward pass


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


version = attrgetter("_version")  # the same of a tensor that requires a gradient, and so is no inference tensor


# What lies in nested containers, and how they are nested; a container that torch's pytree does not know is a leaf.
flatten_tree = pytree.tree_flatten
unflatten_tree = pytree.tree_unflatten


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def frames_of(module: str) -> Iterator[FrameType]:
    """The frames on the stack that run the code of a module, the innermost first.

    The only way to know that torch.distributed.checkpoint or DeepSpeed's engine is calling.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return (frame for frame in frames if frame.f_globals.get("__name__") == module)


def warn(message: str) -> None:
    """Issue a UserWarning that points at the script's line: the innermost frame outside of this package and torch."""
    level = 1
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("dcl_optim", "torch"):
            break
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)


def warn_once(said: set[str], message: str, about: str = "") -> None:
    """Issue a warning, if none about the same was said; where a message differs each time, ``about`` names it."""
    topic = about or message
    if topic not in said:
        said.add(topic)
        warn(message)


def outside_compiled_graphs(function: F) -> F:
    """Keep a hook out of compiled graphs, as torch.optim keeps its own methods out."""
    return cast("F", torch._disable_dynamo(function))


def hooks_of(module: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """A module's hooks of forward and backward passes: the table, the key and the hook of each."""
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        table = vars(module)[name]
        yield from ((table, key, hook) for key, hook in list(table.items()))


def running_ddp() -> nn.Module | None:
    """The DistributedDataParallel whose forward runs now: it may have wrapped the model after the optimizer did."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() if dist.is_available() else None


def count_as_step(optimizer: Optimizer) -> None:
    """Note a step that is left out, so that a scheduler of this optimizer does not warn that it comes before a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class OptimizerInternals(Optimizer):
    """The parts of torch.optim's contract with its own tools that have no public name."""

    _step_supports_amp_scaling = False  # a gradient scaler unscales the gradients itself

    def _set_up_hooks(self) -> None:
        """Create the hook tables and patch ``step``, as torch.optim does, without groups of our own."""
        super().__setstate__({})

    def _run_hooks(self, when: str) -> None:
        for hook in getattr(self, f"_optimizer_{when}_hooks").values():
            hook(self)

    def _passed_through_hooks(self, when: str, state: dict[str, Any]) -> dict[str, Any]:
        for hook in getattr(self, f"_optimizer_{when}_hooks").values():
            state = hook(self, state) or state
        return state

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler replaces `step` on the instance; hooks are closures over other objects. torch.optim drops both.
        return {key: value for key, value in self.__dict__.items() if key != "step" and not key.endswith("_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up_hooks()


@functools.lru_cache(maxsize=64, typed=True)  # 1 and 1.0 are two tensors
def constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor; making it anew in each step would be one kernel more."""
    with torch.inference_mode(False):  # an inference tensor could be in no graph later
        return torch.full((), value, device=device)
