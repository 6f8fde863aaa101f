"""What has happened since the last optimizer step. The algorithm writes it down, and makes a new one each step."""

from __future__ import annotations

import copy
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from dcl_optim._torch import version_of
from dcl_optim.distances import to_rows

T = TypeVar("T")


class Forward:
    """What is known about one training forward pass, or about one tensor of logits that the penalty term got.

    Args:
        logits: the logits z, of any shape with the batch first.
        step: the number of the optimizer step that the pass belongs to, from 1.
        class_dim: the dimension of the classes where it is known, else 1.
        copies: whether the logits are copied, so that in-place edits by the script do not reach them.

    Attributes:
        logits: z, detached.
        rows: z as rows (N, K).
        output: a weak reference to the tensor that the script holds.
        version: how often that tensor was written to before.
        logits_version: how often ``logits`` was written to before; of a copy it does not change.
        nodes: the autograd nodes that a gradient of the logits goes on to; None if the logits are a leaf.
        class_dim: the dimension of the classes.
        last_backward: the backward pass that brought the last gradient, by autograd's number.
        observed: whether the forecaster has learned from it, or was told to skip it.
        prediction: what the forecaster keeps for the backward pass, which only it writes.
        choice: a warning, if the model returned other tensors that may be the logits.
    """

    def __init__(self, logits: Tensor, step: int, class_dim: int = 1, copies: bool = True) -> None:
        self.logits = _copy_of(logits.detach(), class_dim) if copies else logits.detach()
        self.step = step
        self.output = weakref.ref(logits)
        self.version = version_of(logits)
        self.logits_version = version_of(self.logits)
        self.nodes: Any = None if logits.grad_fn is None else logits.grad_fn.next_functions
        self.class_dim = class_dim
        self.rows = to_rows(self.logits, class_dim)
        self.last_backward = -1
        self.observed = False
        self.prediction: Any = None
        self.choice: str | None = None

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
        num_terms: calls of the optimizer's ``penalty``.
        num_terms_used: how many of them took part in a backward pass.
        is_observing: whether the forecaster learns from the next batch: not from a closure's further evaluations.
        is_cleared: whether ``zero_grad`` ran since the last batch.
        not_finite: whether a batch was skipped because its logits or its gradient were not finite.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_forwards = 0
        self.num_backwards = 0
        self.num_batches = 0
        self.last_backward = -1
        self.num_terms = 0
        self.num_terms_used = 0
        self.is_observing = True
        self.is_cleared = False
        self.not_finite = False
        self._forwards: list[weakref.ref[Forward]] = []
        self._logits_of_terms: list[weakref.ref[Tensor]] = []

    def add(self, forward: Forward) -> None:
        """Note a training forward pass; it lives as long as the graph of its logits."""
        self.num_forwards += 1
        self._forwards = [*_alive(self._forwards), weakref.ref(forward)]

    def add_term(self, logits: Tensor) -> None:
        """Note a call of the optimizer's ``penalty``."""
        self.num_terms += 1
        self._logits_of_terms = [*_alive(self._logits_of_terms), weakref.ref(logits)]

    def has_term_of(self, logits: Tensor) -> bool:
        """Whether ``penalty`` was called with this tensor."""
        return any(reference() is logits for reference in self._logits_of_terms)

    def forward_of(self, logits: Tensor) -> Forward | None:
        """The forward pass that returned this very tensor, unedited."""
        for forward in self._alive_forwards():
            if forward.output() is logits and forward.version == version_of(logits):
                return forward
        return None

    def forward_like(self, logits: Tensor, may_read: bool) -> Forward | None:
        """The one forward pass that is not observed yet and returned such logits.

        DistributedDataParallel and conversions to another dtype return another tensor.

        Args:
            logits: what the script holds.
            may_read: whether values are compared; if not, they are only where the shape leaves a choice.
        """
        alike = [one for one in self._alive_forwards() if one.logits.shape == logits.shape and not one.observed]
        if may_read or len(alike) > 1:
            alike = [one for one in alike if _are_equal(one.logits, logits.detach())]
        return alike[0] if len(alike) == 1 else None

    def _alive_forwards(self) -> list[Forward]:
        return [forward for forward in (reference() for reference in self._forwards) if forward is not None]

    def without_batches(self) -> Step:
        """The same step without what was learned: forward passes and terms whose backward pass may still come."""
        step = Step(self.number)
        step.num_terms = self.num_terms - self.num_terms_used
        step._forwards = self._forwards
        step._logits_of_terms = self._logits_of_terms
        return step

    def without_forwards(self) -> Step:
        """The same in a copy of the optimizer, whose forward passes are not those of the script."""
        copied = copy.copy(self)
        copied._forwards = []
        copied._logits_of_terms = []
        return copied


def _alive(references: list[weakref.ref[T]]) -> list[weakref.ref[T]]:
    return [reference for reference in references if reference() is not None]


def _copy_of(logits: Tensor, class_dim: int) -> Tensor:
    """A copy in whose memory the rows lie one after the other, so that no further one is made of them."""
    if logits.ndim <= 2:
        return logits.clone()
    return logits.movedim(class_dim, -1).clone(memory_format=torch.contiguous_format).movedim(-1, class_dim)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of the narrower dtype."""
    if first.device != second.device:
        return False
    dtype = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    tolerance = 4.0 * torch.finfo(dtype).eps
    wider = torch.promote_types(first.dtype, second.dtype)
    return torch.allclose(first.to(wider), second.to(wider), rtol=tolerance, atol=tolerance, equal_nan=True)
