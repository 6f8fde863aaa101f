"""The hooks on the model and its logits. They hold our optimizer weakly, and do nothing in copies without it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dcl_optim import _torch


class Hook:
    """A hook that calls a method of a listener, as long as there is one."""

    def __init__(self, listener: Callable[[], Any], method: str) -> None:
        self.listener = listener
        self._method = method

    @_torch.outside_compiled_graphs
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

    Copies of model and listener together have hooks too. If another optimizer wraps the model, ``replaced`` is called.
    """

    def __init__(self, listener: Any, model: nn.Module, own: nn.Module) -> None:
        self._model = model
        self._own = own
        self.attached = True
        self._attach(listener)

    def _attach(self, listener: Any) -> None:
        self._listener = weakref.ref(listener, lambda _: self.remove())
        self.on_gradient = Hook(self._listener, "on_gradient")
        self._handles: list[Any] = []
        if not self.attached or not vars(self._model):  # empty in the copy of a model that holds its optimizer
            return
        _replace_other(self._own, self._listener)
        self._handles = [
            self._model.register_forward_pre_hook(Hook(self._listener, "before_forward"), with_kwargs=True),
            self._model.register_forward_hook(
                Hook(self._listener, "after_forward"), with_kwargs=True, always_call=True
            ),
            self._own.register_load_state_dict_post_hook(Hook(self._listener, "model_loaded")),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.attached = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listener": self._listener(), "_handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach(state["_listener"])


_listeners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _replace_other(own: nn.Module, listener: weakref.ref[Any]) -> None:
    """Call ``replaced`` of the optimizer that wrapped a user's own module before."""
    before = _listeners.get(own, lambda: None)()
    if before is not None:
        before.replaced()
    _listeners[own] = listener
