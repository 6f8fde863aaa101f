"""Compiling the companion as the model is compiled, however the script did that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

Context = Callable[[Callable[..., Any]], Callable[..., Any]]  # what torch.compile applies: backend, mode, options


def context_of(model: nn.Module) -> Context | None:
    """The compile context that the call running now came through, or that a compiled module carries; None if eager.

    A module that is compiled from outside does not know it. But its hooks run below the compiled call, whose context is
    on the stack.
    """
    carried: Context | None = getattr(model, "dynamo_ctx", None)
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported once something is compiled
    if carried is not None or compiler is None:
        return carried
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_filename == compiler.__file__:
            found = frame.f_locals.get("self")
            if isinstance(found, compiler.OptimizeContext):
                return found
        frame = frame.f_back
    return None


def compile_with(module: nn.Module, context: Context) -> None:
    """Compile a module's call in place, as ``module.compile`` does."""
    module._compiled_call_impl = context(module._call_impl)
