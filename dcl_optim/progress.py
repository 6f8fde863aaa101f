"""What has happened since the last optimizer step. Events note it, questions do not; each step gets a new object."""

from __future__ import annotations

import threading
import weakref
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from dcl_optim.penalty.layout import copy_of_rows, from_rows, to_rows
from dcl_optim.pytorch import synchronization
from dcl_optim.pytorch.internals import version


class Outcome(IntEnum):
    """What a forward pass has become."""

    OPEN = 0  # the forecaster has not learned from it
    GIVEN = 1  # the term got its logits
    LEARNED = 2  # the forecaster has learned from it
    RELEASED = 3  # the step is over


class Stage(IntEnum):
    """How far the script has come since the last step."""

    NOTHING = 0
    FORWARD = 1  # a training forward pass of the model
    CALLED = 2  # a call of ``penalty``
    GRAPH_KEPT = 3  # a backward pass through logits with create_graph=True
    GRADIENTS = 4  # one that brings the penalty's gradients to the trained parameters


class Forward:
    """What is known about one training forward pass, or about one tensor of logits that the term got.

    Args:
        logits: the logits z, of any shape with the batch first. They are copied: what a script or a fused loss writes
            to its own later does not reach the copy.
        step_number: the number of the optimizer step that the pass belongs to, from 1.
        class_dim: the dimension of the classes where it is known, else 1.
        copies: whether they are copied; if not, nobody may read them once the script has them back.

    Attributes:
        rows: z as rows (N, K), detached.
        shape: of the logits.
        output: a weak reference to the tensor that the script holds.
        version: how often that tensor was written to before.
        may_read: whether values may be read of the tensors of this pass.
        nodes: the autograd nodes that a gradient of the logits goes on to; None if the logits are a leaf.
        class_dim: the dimension of the classes.
        backward: the backward pass that brought the last gradient, by autograd's number.
        outcome: what it has become.
        shapes_of_others: the shapes of other tensors that the model returned and that may be the logits.
        prediction: what the forecaster keeps for the backward pass, which only its ``predict`` writes.
        given: what the term keeps for its backward pass.
    """

    def __init__(self, logits: Tensor, step_number: int, class_dim: int = 1, copies: bool = True) -> None:
        self.class_dim = class_dim if class_dim < logits.ndim else 1
        self.rows = (copy_of_rows if copies else to_rows)(logits.detach(), self.class_dim)
        self.shape = logits.shape
        self.step_number = step_number
        self.output = weakref.ref(logits)
        self.version = version(logits)
        self.may_read = synchronization.may_sync(step_number, logits)
        self.nodes: Any = None if logits.grad_fn is None else logits.grad_fn.next_functions
        self.backward = -1
        self.outcome = Outcome.OPEN
        self.shapes_of_others: list[torch.Size] = []
        self.prediction: Any = None
        self.given: Any = None

    @property
    def logits(self) -> Tensor:
        """The copy of z in its shape."""
        return from_rows(self.rows, self.shape, self.class_dim)

    def lay_out(self, class_dim: int) -> None:
        """Lay the logits out as rows along the dimension that holds the classes."""
        self.rows = to_rows(self.logits, class_dim)
        self.class_dim = class_dim

    def release(self) -> None:
        """Let go of all tensors: the script may keep the graph that keeps this object."""
        self.outcome = Outcome.RELEASED
        del self.rows
        self.prediction = None
        self.given = None


class Progress:
    """What has happened since the last optimizer step.

    Args:
        number: of the optimizer step that these batches belong to, from 1.

    Attributes:
        number: the number of that step.
        forwards: the forward passes, by weak references: one lives as long as the graph of its logits.
        stage: how far the script has come; changes with forward passes and gradients of logits.
        not_finite: whether a batch was left out because its logits or its gradient were not finite.
        backward: the last backward pass, by autograd's number; -1 for none.
        is_cleared: whether ``zero_grad`` has cleared the gradients of these batches.
        running: the threads in which a training forward pass runs.
        learns: whether the forecaster learns from the next batch: not from a closure's further evaluations.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self.stage = Stage.NOTHING
        self.not_finite = False
        self.backward = -1
        # Changed by the script's calls of zero_grad and of step with a closure:
        self.is_cleared = False
        self.learns = True
        self.running: set[int] = set()

    # ---- events ------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The model is called for training."""
        self.stage = max(self.stage, Stage.FORWARD)
        self.running.add(threading.get_ident())

    def penalty_called(self, forward: Forward) -> None:
        """The script has called ``penalty`` with these logits."""
        self.stage = max(self.stage, Stage.CALLED)
        if forward.outcome is Outcome.OPEN:  # else the forecaster has learned from it, or the term had it before
            forward.outcome = Outcome.GIVEN

    def gradients_cleared(self) -> None:
        """The script has called ``zero_grad``: if no step follows before the next batch, it was left out."""
        self.is_cleared |= self.stage is Stage.GRADIENTS and self.learns

    def restart(self) -> None:
        """Gradients were cleared without a step: only forward passes and terms are left whose backward may come."""
        self.stage = min(self.stage, Stage.FORWARD)
        self.not_finite = False
        self.is_cleared = False

    def end(self) -> None:
        """The step is over, and a graph that the script keeps must keep nothing else."""
        for forward in self.forwards:
            forward.release()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def forward_of(self, logits: Tensor) -> Forward | None:
        """The forward pass that returned these logits, or the one that returned such and is open, or got its penalty.

        DistributedDataParallel and conversions to another dtype return another tensor. Values are compared where they
        may be read, and of several of one shape.
        """
        for forward in self.forwards:
            if forward.output() is logits and forward.version == version(logits):
                return forward
        for outcome in (Outcome.OPEN, Outcome.GIVEN):
            alike = [one for one in self.forwards if one.outcome is outcome and one.shape == logits.shape]
            if synchronization.may_sync(self.number, logits) or len(alike) > 1:
                alike = [one for one in alike if are_close(one.logits, logits.detach())]
            if len(alike) == 1:
                return alike[0]
        return None


def are_close(first: Tensor, second: Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors are equal up to the rounding of the narrower dtype, or a share of the largest number."""
    if first.device != second.device:
        return False
    if tolerance is None:
        tolerance = 4.0 * max(torch.finfo(tensor.dtype).eps for tensor in (first, second))
    wider = torch.promote_types(first.dtype, second.dtype)
    first = first.to(wider)
    size = first.masked_fill(~first.isfinite(), 0.0).abs().amax() if first.numel() else 0.0
    return torch.allclose(first, second.to(wider), rtol=tolerance, atol=tolerance * float(size), equal_nan=True)
