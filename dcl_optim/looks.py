"""Telling a look at the gradients (``torch.autograd.grad``) from the backward that the step will use."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcl_optim.wrapper import parameters_of


def is_look(optimizer: Optimizer) -> bool:
    """Whether the backward that runs keeps its graph for another one and adds to no parameter's gradient.

    That other one, which may still come, must bring the penalty again. Without a graph that is kept none can come, so
    in the ordinary backward nothing else is asked.
    """
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    return not any(parameter.requires_grad and _accumulates(parameter) for parameter in parameters_of(optimizer))


def _accumulates(parameter: Tensor) -> bool:
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # a gradient that autograd.grad was asked for
        return False
