"""The forward hooks on the model: how an optimizer learns of the model's calls in an unchanged script.

Hooks hold their listener weakly, and go when the optimizer is gone. In a copy or pickle of the module (an EMA copy,
``torch.save(model)``) they do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from dcl_optim import _torch


class HookListener(Protocol):
    """What the hooks report to."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called."""

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The model has returned; give what its caller is to get."""

    def model_loaded(self, module: nn.Module, keys: Any) -> None:
        """A state was loaded into the model."""

    def replaced(self) -> None:
        """Another optimizer wraps the model."""


class _Hook:
    """A hook that calls a method of a listener, as long as there is one."""

    def __init__(self, listener: Callable[[], HookListener | None], method: str) -> None:
        self.listener, self._method = listener, method

    @_torch.outside_compiled_graphs
    def __call__(self, *arguments: Any) -> Any:
        listener = self.listener()
        return None if listener is None else getattr(listener, self._method)(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_no_listener, self._method)

    def __reduce__(self) -> Any:
        return _Hook, (_no_listener, self._method)


def _no_listener() -> None:
    return None


class ModuleHooks:
    """The hooks of one optimizer on a model, and on the user's ``own`` module in it; :meth:`remove` takes them off.

    A model that is being copied together with its optimizer is not there yet: None, and no hooks.
    """

    def __init__(self, listener: HookListener, model: nn.Module | None, own: nn.Module | None) -> None:
        reference = weakref.ref(listener, lambda _: self.remove())
        before, after, loaded = (_Hook(reference, name) for name in ("before_forward", "after_forward", "model_loaded"))
        self._handles: list[Any] = []
        if model is None or own is None:
            return
        self._handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
            own.register_load_state_dict_post_hook(loaded),
        ]

    def remove(self) -> None:
        """Take the hooks off; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def is_ours(hook: Any) -> bool:
    """Whether a hook is one of this module's."""
    return isinstance(hook, _Hook)


def replace_others(model: nn.Module) -> None:
    """Tell the optimizers that have their hooks on the model, or on a module inside it, that another one wraps it.

    Hooks that a copy of a model has got from another one are removed.
    """
    for module in model.modules():
        for table, key, hook in list(_torch.hooks_of(module, _torch.OUR_HOOKS)):
            if is_ours(hook):
                listener = hook.listener()
                if listener is not None:
                    listener.replaced()
                elif key in table:  # the module is a copy
                    _torch.remove_hook(module, table, key)
