"""What a model returned: its logits, and the loss that it may have computed itself."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def find_logits(output: Any) -> Tensor:
    """Find the logits in what a model returned.

    A tensor is the logits; otherwise ``output.logits`` (dataclasses, named tuples), ``output["logits"]`` or
    ``output["out"]`` (mappings), or the first item of a tuple or list.

    Args:
        output: what the model's forward returned.

    Raises:
        TypeError: none of these is a floating-point tensor with a batch dimension.

    Examples:
        >>> find_logits({"logits": torch.zeros(2, 3), "features": torch.zeros(2, 8)}).shape
        torch.Size([2, 3])
    """
    found = output
    if not isinstance(output, Tensor):
        if getattr(output, "logits", None) is not None:
            found = output.logits
        elif isinstance(output, Mapping):
            found = output.get("logits", output.get("out"))
        elif isinstance(output, (tuple, list)) and output:
            found = output[0]
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim == 0:
        raise TypeError(
            f"no logits found in the model's output of type {type(output).__name__}; pass logits=<function of the "
            "output that returns the logits tensor>"
        )
    return found


def find_loss(output: Any) -> Tensor | None:
    """Find the loss that a model computed itself: a scalar ``output.loss`` or ``output["loss"]`` with a gradient."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and found.ndim == 0 and found.grad_fn is not None else None


def through_logits(z: Tensor, loss: Tensor, output: Any) -> Tensor:
    """Make the backward of a model's own loss pass through its logits, where one node gives both (a compiled model).

    Autograd calls no hook with a gradient for an output of a node that the loss does not come through. The output then
    gets a loss of the same value that sends zeros to the logits.
    """
    if loss.grad_fn is not z.grad_fn:
        return loss
    linked: Tensor = _Linked.apply(loss, z)
    if isinstance(output, MutableMapping):
        output["loss"] = linked
    else:
        output.loss = linked
    return linked


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(ctx.saved_tensors[0])


def conversion_source(z: Tensor) -> tuple[Any, int] | None:
    """The autograd node, and which of its outputs, that z was converted from to another dtype; None if it was not.

    Under mixed precision some libraries return converted logits with a loss that was taken from the original ones.
    """
    node, index = z.grad_fn, z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, index = node.next_functions[0]
    is_computed = node is not None and node is not z.grad_fn and not node.name().endswith("AccumulateGrad")
    return (node, index) if is_computed else None
