"""The forward hooks on the model and the criterion: how an optimizer learns of their calls in an unchanged script.

Hooks hold their listener weakly, and go when the optimizer is gone. A copy or pickle of the module (an EMA copy,
``torch.save(model)``) has none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from dcl_optim import _torch
from dcl_optim.distributed import unwrapped


class HookListener(Protocol):
    """What the hooks report to."""

    def before_forward(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called."""

    def after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The model has returned; give what its caller is to get."""

    def after_criterion(self, arguments: Any, logits: Any, targets: Any, loss: Tensor) -> None:
        """The criterion has returned a loss that has a gradient."""

    def model_loaded(self) -> None:
        """A state was loaded into the model."""

    def replaced(self) -> None:
        """Another optimizer wraps the model."""


class ModuleHooks:
    """The hooks of one optimizer on a model and a criterion; :meth:`remove` takes them off."""

    def __init__(self, listener: HookListener, model: nn.Module, criterion: nn.Module | None) -> None:
        self._listener: Callable[[], HookListener | None] = weakref.ref(listener, lambda _: self.remove())
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            model.register_forward_hook(self.after_forward, with_kwargs=True),
            unwrapped(model).register_load_state_dict_post_hook(self.after_load),
        ]
        if criterion is not None:
            self._handles.append(criterion.register_forward_hook(self.after_criterion, with_kwargs=True))
        for handle in self._handles:
            _torch.leave_out_of_copies(handle)

    def remove(self) -> None:
        """Take the hooks off; the modules are as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._listener = _nothing

    @_torch.outside_compiled_graphs
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model."""
        listener = self._listener()
        if listener is not None:
            listener.before_forward(module.training, args, kwargs)

    @_torch.outside_compiled_graphs
    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the model."""
        listener = self._listener()
        return None if listener is None else listener.after_forward(args, kwargs, output)

    def after_load(self, module: nn.Module, keys: Any) -> None:
        """Hook of the model's ``load_state_dict``."""
        listener = self._listener()
        if listener is not None:
            listener.model_loaded()

    @_torch.outside_compiled_graphs
    def after_criterion(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> None:
        """Forward hook of the criterion."""
        listener = self._listener()
        if listener is None or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        logits = args[0] if args else kwargs.get("input")
        targets = args[1] if len(args) > 1 else kwargs.get("target")
        listener.after_criterion((args, kwargs), logits, targets, loss)


def _nothing() -> None:
    return None


def is_ours(hook: Any) -> bool:
    """Whether a hook is one of this class."""
    return isinstance(getattr(hook, "__self__", None), ModuleHooks)


def replace_others(model: nn.Module) -> None:
    """Tell the optimizers that have their hooks on the model, or on a module inside it, that another one wraps it."""
    for module in model.modules():
        for _, _, hook in list(_torch.hooks_of(module)):
            listener = hook.__self__._listener() if is_ours(hook) else None
            if listener is not None:
                listener.replaced()
