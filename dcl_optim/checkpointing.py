"""Telling activation checkpointing's recomputations from forwards, and keeping the companion out of its books."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dcl_optim.callers import frames_of


def running_backward() -> int:
    """Autograd's number of the backward that runs in this thread, -1 outside of one.

    A forward inside the very backward that has brought a gradient to its logits is that forward's recomputation. A
    reentrant checkpoint around the model runs its first forward without gradients, and backward anew inside: another
    number.
    """
    return torch._C._current_graph_task_id()


def outside_checkpoints() -> AbstractContextManager[Any]:
    """Keep what the companion saves for its backward out of a checkpoint that the model is called in.

    A non-reentrant checkpoint counts what is saved inside it, and the recomputation, which is the model's alone, has to
    save the same again.
    """
    if any(frames_of("torch.utils.checkpoint")):
        return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    return nullcontext()


def _itself(tensor: Tensor) -> Tensor:
    return tensor
