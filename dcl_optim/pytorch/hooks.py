"""The hooks on the model and its logits. They hold our optimizer weakly, and do nothing in copies without it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dcl_optim.pytorch import internals


class Hook:
    """A hook that calls a method of a listener, as long as there is one."""

    def __init__(self, listener: Callable[[], Any], method: str) -> None:
        self.listener = listener
        self._method = method

    @internals.outside_compiled_graphs
    def __call__(self, *arguments: Any) -> Any:
        listener = self.listener()
        return None if listener is None else getattr(listener, self._method)(*arguments)

    def __reduce__(self) -> Any:  # in copies and pickles, which torch.load reads by default
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    """Stand for our hooks in copies and pickles of a model, where there is no optimizer."""
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    """Do nothing."""


torch.serialization.add_safe_globals([_no_hook])


class ModuleHooks:
    """The hooks of one optimizer on a model and the user's own module in it, while ``attached``; and that for logits.

    If another optimizer wraps the model, ``replaced`` is called. Those of a copy do nothing: the listener attaches
    others.
    """

    def __init__(self, listener: Any, model: nn.Module, own: nn.Module, predicts: bool) -> None:
        self.attached = True
        reference = weakref.ref(listener, lambda _: self.remove())
        self.on_gradient = Hook(reference, "on_gradient")
        _replace_other(own, reference)
        self._handles: list[Any] = [
            model.register_forward_hook(Hook(reference, "after_forward"), with_kwargs=True),
            own.register_load_state_dict_post_hook(Hook(reference, "model_loaded")),
        ]
        if predicts:
            before = Hook(reference, "before_forward")
            self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.attached = False


_listeners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _replace_other(own: nn.Module, listener: weakref.ref[Any]) -> None:
    """Call ``replaced`` of the optimizer that wrapped a user's own module before."""
    before = _listeners.get(own, lambda: None)()
    if before is not None:
        before.replaced()
    _listeners[own] = listener
