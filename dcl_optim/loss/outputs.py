"""What a model returned: its logits, and the loss that it may have computed itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim._torch import warn


def find_logits(output: Any) -> Tensor:
    """Find the logits in what a model returned.

    A tensor is the logits; otherwise ``output.logits`` (dataclasses, named tuples), ``output["logits"]`` or
    ``output["out"]`` (mappings), or the first item of a tuple or list. Losses are passed over there: 0-dim tensors,
    and tensors of one dimension where one of more follows.

    Args:
        output: what the model's forward returned.

    Examples:
        >>> find_logits({"logits": torch.zeros(2, 3), "features": torch.zeros(2, 8)}).shape
        torch.Size([2, 3])
        >>> find_logits((torch.tensor(0.7), torch.zeros(2, 3))).shape
        torch.Size([2, 3])
    """
    return LogitsFinder(None)(output)


class LogitsFinder:
    """:func:`find_logits`, or the script's function with a check of what it returns.

    Warns once if a tuple or list has several tensors that may be the logits.
    """

    def __init__(self, given: Callable[[Any], Any] | None) -> None:
        self._given, self._warned = given, given is not None

    def __call__(self, output: Any) -> Tensor:
        if self._given is not None:
            found = self._given(output)
        else:
            found = output if isinstance(output, Tensor) else _inside(output)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"no logits found in the model's output of type {type(output).__name__}; pass logits=<function of the "
                "output that returns the logits tensor>"
            )
        if not found.is_floating_point() or not found.ndim:
            raise TypeError(
                f"the tensor that the model returned as its logits is of {found.dtype}, shape {tuple(found.shape)}.\n"
                "  Fix: return real floating-point logits with a batch dimension, as in (logits, loss), or pass logits="
            )
        return found

    def warn_of_choice(self, output: Any, z: Tensor) -> None:
        """Warn if other tensors in a tuple or list may be the logits; no name decides there."""
        if self._warned or not isinstance(output, (tuple, list)) or getattr(output, "logits", None) is not None:
            return
        names = [
            (item is z, f"item {index} of shape {tuple(item.shape)}")
            for index, item in enumerate(output)
            if isinstance(item, Tensor) and item.requires_grad and item.shape[:1] == z.shape[:1]
        ]
        others = [name for is_taken, name in names if not is_taken]
        if others:
            self._warned, taken = True, dict(names)[True]
            warn(
                f"the model returned a {type(output).__name__} in which several tensors may be the logits: the penalty "
                f"is on {taken}, not on {' or '.join(others)}; pass logits=lambda output: output[...] to choose"
            )


def _inside(output: Any) -> Any:
    if getattr(output, "logits", None) is not None:
        return output.logits
    if isinstance(output, Mapping):
        return output.get("logits", output.get("out"))
    return _first(output) if isinstance(output, (tuple, list)) else None


def _first(output: tuple[Any, ...] | list[Any]) -> Any:
    items = [item for item in output if item is not None and not (isinstance(item, Tensor) and item.ndim == 0)]
    first = next(iter(items or output), None)
    if isinstance(first, Tensor) and first.ndim == 1:
        return next((item for item in items if isinstance(item, Tensor) and item.ndim > 1), first)
    return first


def find_loss(output: Any) -> Tensor | None:
    """Find the loss that a model computed itself, a scalar with a gradient, in an output as in :func:`find_logits`.

    ``output.loss``, ``output["loss"]``, or the only one in a tuple or list.

    Examples:
        >>> loss = torch.ones((), requires_grad=True) * 2
        >>> find_loss((loss, torch.zeros(2, 3))) is loss, find_loss(torch.zeros(2, 3))
        (True, None)
    """
    if isinstance(output, (tuple, list)) and getattr(output, "loss", None) is None:
        found = [item for item in output if _is_loss(item)]
        return found[0] if len(found) == 1 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if _is_loss(loss) else None


def _is_loss(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 0 and item.grad_fn is not None


def through_logits(z: Tensor, loss: Tensor, output: Any) -> tuple[Tensor, Any]:
    """Make the backward of a compiled model's own loss pass through its logits, whose hook autograd would not call.

    The output gets a loss of the same value that sends zeros to the logits; a tuple is replaced by another one.
    """
    if loss.grad_fn is not z.grad_fn:
        return loss, output
    linked: Tensor = _Linked.apply(loss, z)
    if isinstance(output, MutableMapping):
        output["loss"] = linked
    elif isinstance(output, list):
        output[:] = [linked if item is loss else item for item in output]
    elif isinstance(output, tuple):
        make = getattr(output, "_make", type(output))  # of a named tuple
        output = make(linked if item is loss else item for item in output)
    else:
        output.loss = linked
    return linked, output


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(ctx.saved_tensors[0])


def find_shift(labels: Tensor, z: Tensor, loss: Tensor) -> bool | None:
    """Whether a model's own loss compares the logits of a position with the label of the next one. Synchronizes.

    The loss is a mean over the labels that are not -100. None if neither the labels nor the shifted ones have it.
    """
    if labels.is_floating_point() or labels.shape != z.shape[:-1]:
        return None
    rows, apart = z.detach().float().flatten(0, -2), []
    for is_shifted in (False, True) if z.ndim == 3 else (False,):
        value = F.cross_entropy(rows, (shift(labels) if is_shifted else labels).flatten().long())
        apart.append((float((value - loss.detach()).abs() / loss.detach().abs()), is_shifted))
    least, is_shifted = min(apart)
    return is_shifted if least < 0.02 and (len(apart) == 1 or max(apart)[0] > 10 * least) else None


def shift(labels: Tensor) -> Tensor:
    """The label of the next position, (batch, time); -100 at the last."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def conversion_source(z: Tensor) -> tuple[Any, int] | None:
    """The autograd node, and which of its outputs, that z was converted from to another dtype; None if it was not.

    Under mixed precision some libraries return converted logits with a loss that was taken from the original ones.
    """
    node, index = z.grad_fn, z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, index = node.next_functions[0]
    is_computed = node is not None and node is not z.grad_fn and not node.name().endswith("AccumulateGrad")
    return (node, index) if is_computed else None
