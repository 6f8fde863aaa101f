"""What a model returned: where its logits are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dcl_optim.pytorch.ranks import SHARDED_LOGITS, is_sharded

__all__ = ["find_logits"]


class NoLogits(TypeError):
    """A model's output shows no logits."""


def find_logits(output: Any, given: Callable[[Any], Any] | None = None) -> Tensor:
    """Find the logits in what a model returned.

    A tensor is the logits; otherwise ``output.logits`` (dataclasses, named tuples), ``output["logits"]`` or
    ``output["out"]`` (mappings), or the first tensor of a tuple or list that has rows and classes; if none has two
    dimensions, the first with one.

    Args:
        output: what the model's forward returned.
        given: the script's own function, whose result is checked.

    Raises:
        NoLogits: there are none.

    Examples:
        >>> import torch
        >>> find_logits({"logits": torch.zeros(2, 3), "features": torch.zeros(2, 8)}).shape
        torch.Size([2, 3])
        >>> find_logits((torch.tensor(0.7), torch.zeros(2, 3))).shape
        torch.Size([2, 3])
    """
    if given is not None:
        found = given(output)
    elif isinstance(output, Tensor):
        found = output
    else:
        found = _inside(output)
    if not isinstance(found, Tensor):
        keys = f" with keys {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        raise NoLogits(
            f"no logits found in the model's output of type {type(output).__name__}{keys}.\n"
            "  Fix: give the wrapper a function that returns the logits tensor, as in logits=lambda output: "
            "output[...]; or with DCP add the penalty to the loss, loss + optimizer.penalty(logits, labels)"
        )
    if type(found) is not Tensor and is_sharded(found):
        raise NoLogits(SHARDED_LOGITS.format(cast("Any", found).placements))
    if not found.is_floating_point() or not found.ndim or found.is_nested:
        kind = "nested tensor" if found.is_nested else "tensor"
        raise NoLogits(
            f"the {kind} that the model returned as its logits, or penalty got, is of {found.dtype}, shape "
            f"{tuple(found.shape)}.\n"
            "  Fix: return real floating-point logits with a batch dimension, as in (logits, loss), or pass logits=; "
            "call penalty(logits, labels). Of a nested tensor return the values, logits.values(); or with DCP add "
            "their penalty to the loss, loss + optimizer.penalty(logits.values(), labels)"
        )
    return found


def _inside(output: Any) -> Any:
    if getattr(output, "logits", None) is not None:
        return output.logits
    if isinstance(output, Mapping):
        return output.get("logits", output.get("out"))
    if not isinstance(output, (tuple, list)):
        return None
    tensors = [item for item in output if isinstance(item, Tensor)]
    return max(tensors, key=lambda tensor: min(tensor.ndim, 2), default=None)


def shapes_of_others(output: Any, z: Tensor) -> list[torch.Size]:
    """The shapes of other tensors than z in a tuple or list that may be the logits; none if a field has that name."""
    if not isinstance(output, (tuple, list)) or hasattr(output, "logits"):
        return []
    return [item.shape for item in output if isinstance(item, Tensor) and item.requires_grad and item is not z]


def conversion_source(z: Tensor) -> tuple[Any, int] | None:
    """The autograd node, and which of its outputs, that z was converted from to another dtype; None if it was not.

    Under mixed precision some libraries return converted logits with a loss that was taken from the original ones.
    """
    node: Any = z.grad_fn
    index = z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, index = node.next_functions[0]
    is_computed = node is not z.grad_fn and not node.name().endswith("AccumulateGrad")
    return (node, index) if is_computed else None


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The leaves that a backward pass from tensors would give a gradient to."""
    leaves = []
    waiting: list[Any] = [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]
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
