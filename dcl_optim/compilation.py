"""Compiling the companion as the model is compiled, however the script did that."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from dcl_optim import twin
from dcl_optim.callers import frames_of

Context = Callable[[Callable[..., Any]], Callable[..., Any]]  # what torch.compile applies: backend, mode, options


def context_of(model: nn.Module) -> Context | None:
    """The compile context that a model carries or that the call running now came through; None if it is not compiled.

    A module that is compiled from outside does not know it. But its hooks run below the compiled call, whose context is
    on the stack.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")  # imported once something is compiled
    if compiler is None:
        return None
    for module in twin.layers(model):
        if isinstance(module, compiler.OptimizedModule):
            return module.dynamo_ctx
        cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
        for content in [cell.cell_contents for cell in cells]:
            if isinstance(content, compiler.OptimizeContext):
                return content
    for frame in frames_of(compiler.__name__):
        found = frame.f_locals.get("self")
        if isinstance(found, compiler.OptimizeContext):
            return found
    return None


def compile_with(module: nn.Module, context: Context, apart: bool = False) -> None:
    """Compile a module's call in place, as ``module.compile`` does.

    Args:
        module: the module.
        context: what the model was compiled with.
        apart: whether it has other hooks than the model, by which torch tells two graphs apart only when asked to.
    """
    compiled = context(module._call_impl)
    module._compiled_call_impl = functools.partial(_looking_at_hooks, compiled) if apart else compiled


def _looking_at_hooks(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    config: Any = sys.modules["torch._dynamo.config"]
    with config.patch(skip_nnmodule_hook_guards=False):
        return compiled(*args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's own call is compiled."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None
