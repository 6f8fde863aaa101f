"""What has happened since the last optimizer step. The algorithm writes it down, and makes a new one each step."""

from __future__ import annotations

import copy
import weakref
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dcl_optim._torch import version_of
from dcl_optim.layout import copy_by_rows, to_rows


class State(Enum):
    """How a forward pass has ended."""

    OPEN = "no backward pass has come through it, or one of a loss that is still to be read"
    LEARNED = "the forecaster has learned from it"
    MISSED = "its batch could not be read, or is not finite"


class Part(Enum):
    """What a backward pass is to a forward pass."""

    LEARN = "it gets its penalty, and the forecaster learns from it"
    REPEAT = "it gets its penalty, and was learned already or is not to be"
    IGNORE = "nothing: it trains no parameter"


class Forward:
    """What is known about one training forward pass, or about one tensor of logits that the penalty term got.

    Args:
        logits: the logits z, of any shape with the batch first. They are copied: what a script or a fused loss writes
            to its own later does not reach the copy.
        step: the number of the optimizer step that the pass belongs to, from 1.
        class_dim: the dimension of the classes where it is known, else 1.

    Attributes:
        logits: the copy of z, detached.
        rows: z as rows (N, K).
        output: a weak reference to the tensor that the script holds.
        version: how often that tensor was written to before.
        nodes: the autograd nodes that a gradient of the logits goes on to; None if the logits are a leaf.
        class_dim: the dimension of the classes.
        last_backward: the backward pass that brought the last gradient, by autograd's number.
        state: how it has ended.
        is_one_of_several: whether the model returned other tensors that may be the logits.
        has_term: whether ``penalty`` was called with its logits.
        prediction: what the forecaster keeps for the backward pass, which only its ``predict`` writes.
    """

    def __init__(self, logits: Tensor, step: int, class_dim: int = 1) -> None:
        self.logits = copy_by_rows(logits.detach(), class_dim)
        self.step = step
        self.output = weakref.ref(logits)
        self.version = version_of(logits)
        self.nodes: Any = None if logits.grad_fn is None else logits.grad_fn.next_functions
        self.class_dim = class_dim
        self.rows = to_rows(self.logits, class_dim)
        self.last_backward = -1
        self.state = State.OPEN
        self.is_one_of_several = False
        self.has_term = False
        self.prediction: Any = None

    def lay_out(self, class_dim: int) -> None:
        """Lay the logits out as rows along the dimension that holds the classes."""
        if class_dim != self.class_dim:
            self.class_dim = class_dim
            self.rows = to_rows(self.logits, class_dim)


class Step:
    """What has happened since the last optimizer step.

    Args:
        number: of the optimizer step that these batches belong to, from 1.

    Attributes:
        num_forwards: training forward passes of the model.
        num_backwards: backward passes that reached their logits, also those that are not part of the training.
        num_batches: backward passes that brought gradients to the trained parameters.
        last_backward: the last backward pass that brought a gradient to logits, by autograd's number.
        has_term: whether ``penalty`` was called, and the gradients were not cleared since.
        has_used_term: whether a backward pass has come through a penalty term.
        is_observing: whether the forecaster learns from the next batch: not from a closure's further evaluations.
        trained: a parameter that had a gradient after the last backward pass, if one had.
        version: how often that parameter was written to before.
        is_running: whether a backward pass has begun and not ended, unless by an error.
        is_zeroed: whether the optimizer's ``zero_grad`` has set gradients to zero in place since the last batch.
        not_finite: whether a batch was skipped because its logits or its gradient were not finite.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_forwards = 0
        self.num_backwards = 0
        self.num_batches = 0
        self.last_backward = -1
        self.has_term = False
        self.has_used_term = False
        self.is_observing = True
        self.trained: Tensor | None = None
        self.version: int | None = None
        self.is_running = False
        self.is_zeroed = False
        self.not_finite = False
        self._forwards: list[weakref.ref[Forward]] = []

    def add(self, forward: Forward) -> None:
        """Note a forward pass; it lives as long as the graph of its logits."""
        self._forwards = [reference for reference in self._forwards if reference() is not None]
        self._forwards.append(weakref.ref(forward))

    def begin(self, forward: Forward, backward: int) -> Part:
        """Note that a backward pass brings a gradient to a forward pass's logits and on to trained parameters."""
        self.num_backwards += 1
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the script's loss
            return Part.IGNORE
        forward.last_backward = backward
        self.last_backward = backward
        self.num_batches += 1
        self.is_zeroed = False
        self.is_running = backward != -1
        return Part.LEARN if self.is_observing and forward.state is not State.LEARNED else Part.REPEAT

    def are_gradients_gone(self, backward: int = -1) -> bool:
        """Whether gradients were cleared without a step, as where a gradient scaler skips it.

        Those that were there after the backward pass are not there any more. FSDP2 may have had none. A backward pass
        that an error has ended leaves none that a step takes.

        Args:
            backward: the backward pass that runs; batches that it has brought have no gradients yet.
        """
        if not self.num_batches or not self.is_observing or self.last_backward == backward != -1:
            return False
        if self.trained is None:
            return self.is_zeroed or self.is_running
        return self.is_zeroed or self.trained.grad is None

    def forward_of(self, logits: Tensor) -> Forward | None:
        """The forward pass that returned this very tensor, unedited."""
        for forward in self._alive():
            if forward.output() is logits and forward.version == version_of(logits):
                return forward
        return None

    def forward_like(self, logits: Tensor, may_read: bool) -> Forward | None:
        """The one open forward pass that returned such logits.

        DistributedDataParallel and conversions to another dtype return another tensor.

        Args:
            logits: what the script holds.
            may_read: whether values are compared; if not, only those of several of one shape are.
        """
        alike = [one for one in self._alive() if one.state is State.OPEN and one.logits.shape == logits.shape]
        if may_read or len(alike) > 1:
            alike = [one for one in alike if are_close(one.logits, logits.detach())]
        return alike[0] if len(alike) == 1 else None

    def _alive(self) -> list[Forward]:
        return [forward for forward in (reference() for reference in self._forwards) if forward is not None]

    def without_batches(self) -> Step:
        """The same step without what was learned: forward passes and terms whose backward pass may still come."""
        step = Step(self.number)
        step.num_forwards = self.num_forwards
        step.has_term = self.has_term and not self.has_used_term
        step._forwards = self._forwards
        return step

    def without_forwards(self) -> Step:
        """The same in a copy of the optimizer, whose forward passes are not those of the script."""
        copied = copy.copy(self)
        copied._forwards = []
        return copied


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
