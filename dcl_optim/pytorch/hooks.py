"""The hooks on the model and its logits. They hold our optimizer weakly, and do nothing in copies without it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dcl_optim.pytorch import internals


def _do_nothing(*arguments: Any) -> None:
    """Do nothing."""


class Hook:
    """A hook that calls a method of a listener, as long as there is one.

    Args:
        listener: gives it, or None.
        method: its name.
        otherwise: called if the listener is gone, and was not called before.
    """

    def __init__(self, listener: Callable[[], Any], method: str, otherwise: Callable[..., None] = _do_nothing) -> None:
        self.listener = listener
        self.otherwise = otherwise
        self._method = method

    @internals.outside_compiled_graphs
    def __call__(self, *arguments: Any) -> Any:
        listener = self.listener()
        if listener is None:
            return self.otherwise(*arguments)
        self.otherwise = _do_nothing
        return getattr(listener, self._method)(*arguments)

    def __reduce__(self) -> Any:  # in copies and pickles, which torch.load reads by default
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    """Stand for our hooks in copies and pickles of a model, where there is no optimizer."""
    return _do_nothing


torch.serialization.add_safe_globals([_no_hook])


_replace: weakref.WeakKeyDictionary[nn.Module, Hook] = weakref.WeakKeyDictionary()  # called when another wraps it


class ModuleHooks:
    """The hooks of one optimizer on a model and the user's own module in it, while ``attached``; and that for logits.

    If another optimizer wraps the model, ``replaced`` is called. Those of a copy do nothing: the listener attaches
    others. The hooks go with the listener, unless it saw no forward pass: then ``alone`` is called with each.
    """

    def __init__(
        self, listener: Any, model: nn.Module, own: nn.Module, predicts: bool, alone: Callable[..., None]
    ) -> None:
        self.attached = True
        reference = weakref.ref(listener, self._listener_is_gone)
        self.on_gradient = Hook(reference, "on_gradient")
        self._after = Hook(reference, "after_forward", alone)
        _replace.get(own, _do_nothing)()
        _replace[own] = Hook(reference, "replaced", self.remove)
        self._handles: list[Any] = [
            model.register_forward_hook(self._after, with_kwargs=True),
            own.register_load_state_dict_post_hook(Hook(reference, "model_loaded")),
        ]
        if predicts:
            before = Hook(reference, "before_forward")
            self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))

    def _listener_is_gone(self, _: Any) -> None:
        if self._after.otherwise is _do_nothing:
            self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.attached = False
