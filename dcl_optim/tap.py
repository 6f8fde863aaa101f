"""The hooks on the user's modules: how an optimizer learns of forwards and criteria without a change in the script.

Hooks hold what they report to weakly and turn inert when the module is copied or pickled (an EMA copy,
``torch.save(model)``) or the optimizer is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dcl_optim.regularizer import Regularizer


# As torch.optim does it: what bookkeeping hooks do is not for the compiler to trace.
_outside_compiled_graphs: Callable[..., Any] = torch._disable_dynamo


class Tap:
    """The hooks of one optimizer on a model and a criterion; take them off with :meth:`remove`."""

    def __init__(self, regularizer: Regularizer) -> None:
        self._regularizer: Callable[[], Regularizer | None] = weakref.ref(regularizer, lambda _: self.remove())
        self._handles: list[Any] = []

    @staticmethod
    def replace_others(model: nn.Module) -> None:
        """Take the place of optimizers that have their hooks on the model, or on a module inside it."""
        for module in model.modules():
            taps = [owner for owner in _hook_owners(module) if isinstance(owner, Tap)]
            for regularizer in [tap._regularizer() for tap in taps]:
                if regularizer is not None:
                    regularizer.replace()

    def attach_to_model(self, model: nn.Module) -> None:
        """Report the model's training forwards to the optimizer."""
        drop_inert_hooks(model)
        self._handles += [
            model.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            model.register_forward_hook(self.after_forward, with_kwargs=True),
        ]

    def attach_to_end(self, model: nn.Module) -> None:
        """Report the end of the model's forwards, also of those that raise."""
        self._handles.append(model.register_forward_hook(self.forward_ended, always_call=True))

    def attach_to_criterion(self, criterion: nn.Module) -> None:
        """Report the criterion's labels and its loss to the optimizer."""
        self._handles.append(criterion.register_forward_hook(self.after_criterion, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off again; the modules are as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._regularizer = _nothing

    @property
    def live(self) -> bool:
        """Whether the optimizer still exists."""
        return self._regularizer() is not None

    @_outside_compiled_graphs
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        regularizer = self._regularizer()
        if regularizer is not None:
            regularizer.before_forward(module.training, args, kwargs)

    @_outside_compiled_graphs
    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        regularizer = self._regularizer()
        if regularizer is not None:
            regularizer.after_forward(args, kwargs, output)

    @_outside_compiled_graphs
    def forward_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        regularizer = self._regularizer()
        if regularizer is not None:
            regularizer.forecaster.forward_ended()

    @_outside_compiled_graphs
    def after_criterion(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> None:
        regularizer = self._regularizer()
        if regularizer is None or not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        names = ("input", "target")
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
        regularizer.after_criterion((args, kwargs), found[0], found[1], loss)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tap:
        return _inert()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inert, ())


def _nothing() -> None:
    return None


def _inert() -> Tap:
    tap = Tap.__new__(Tap)
    tap._regularizer, tap._handles = _nothing, []
    return tap


def _hook_owners(module: nn.Module) -> list[Any]:
    return [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]


def drop_inert_hooks(module: nn.Module) -> None:
    """Remove what a copied hook left on a copied module."""
    for hooks, with_kwargs in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Tap) and not owner.live:
                del hooks[key]
                with_kwargs.pop(key, None)


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
    if not isinstance(found, Tensor) or not torch.is_floating_point(found) or found.ndim == 0:
        raise TypeError(
            f"no logits found in the model's output of type {type(output).__name__}; pass logits=<function of the "
            "output that returns the logits tensor>"
        )
    return found


def find_loss(output: Any) -> Tensor | None:
    """Find the loss that a model computed itself: a scalar ``output.loss`` or ``output["loss"]`` with a gradient."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and found.ndim == 0 and found.requires_grad else None


def through(z: Tensor, loss: Tensor, output: Any) -> Tensor:
    """Make the backward of a model's own loss pass by its logits, where one node gives both (a compiled model).

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

    Under mixed precision some libraries return converted logits beside a loss that was taken from the original ones.
    """
    node, index = z.grad_fn, z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, index = node.next_functions[0]
    is_computed = node is not None and node is not z.grad_fn and not node.name().endswith("AccumulateGrad")
    return (node, index) if is_computed else None
