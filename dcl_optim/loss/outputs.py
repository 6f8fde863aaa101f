"""What a model returned: where its logits are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        >>> import torch
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
        self._given = given
        self._warned = given is not None

    def __call__(self, output: Any) -> Tensor:
        if self._given is not None:
            found = self._given(output)
        else:
            found = output if isinstance(output, Tensor) else _inside(output)
        if not isinstance(found, Tensor):
            raise TypeError(_not_found(output))
        if not found.is_floating_point() or not found.ndim:
            raise TypeError(
                f"the tensor that the model returned as its logits is of {found.dtype}, shape {tuple(found.shape)}.\n"
                "  Fix: return real floating-point logits with a batch dimension, as in (logits, loss), or pass logits="
            )
        return found

    def choice_of(self, output: Any, z: Tensor) -> str | None:
        """Say if other tensors in a tuple or list may be the logits; no name decides there."""
        if self._warned or not isinstance(output, (tuple, list)) or getattr(output, "logits", None) is not None:
            return None
        taken = ""
        others = []
        for index, item in enumerate(output):
            if isinstance(item, Tensor) and item.requires_grad and item.shape[:1] == z.shape[:1]:
                name = f"item {index} of shape {tuple(item.shape)}"
                if item is z:
                    taken = name
                else:
                    others.append(name)
        if not others:
            return None
        return (
            f"the model returned a {type(output).__name__} in which several tensors may be the logits: the penalty is "
            f"on {taken}, not on {' or '.join(others)}; pass logits=lambda output: output[...] to choose"
        )

    def warn_of_choice(self, choice: str) -> None:
        """Warn once."""
        if not self._warned:
            self._warned = True
            warn(choice)


def _not_found(output: Any) -> str:
    kind = type(output).__name__
    example = "output[...]"
    if isinstance(output, Mapping) and output:
        kind += f" with keys {', '.join(map(repr, output))}"
        example = f"output[{next(iter(output))!r}]"
    return (
        f"no logits found in the model's output of type {kind}.\n"
        f"  Fix: give the wrapper a function that returns the logits tensor, as in logits=lambda output: {example}"
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


def conversion_source(z: Tensor) -> tuple[Any, int] | None:
    """The autograd node, and which of its outputs, that z was converted from to another dtype; None if it was not.

    Under mixed precision some libraries return converted logits with a loss that was taken from the original ones.
    """
    node = z.grad_fn
    index = z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, index = node.next_functions[0]
    is_computed = node is not None and node is not z.grad_fn and not node.name().endswith("AccumulateGrad")
    return (node, index) if is_computed else None
