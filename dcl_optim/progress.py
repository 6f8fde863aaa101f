"""What has happened since the last optimizer step. Events note it, questions do not; each step gets a new object."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim import _sync
from dcl_optim._optim import have_gradients, parameters_of
from dcl_optim._torch import Reach, call_after_backward, current_backward, reach_of_backward, version
from dcl_optim.layout import copy_of_rows, from_rows, to_rows


class Outcome(IntEnum):
    """What a forward pass has become."""

    OPEN = 0  # no backward pass has come through it, or one of a loss that is still to be read
    MISSED = 1  # its batch could not be read, or is not finite
    GIVEN = 2  # the penalty term got its logits
    LEARNED = 3  # the forecaster has learned from it
    RELEASED = 4  # the step is over


class Stage(IntEnum):
    """How far the script has come since the last step."""

    NOTHING = 0
    FORWARD = 1  # a training forward pass of the model
    INPUTS = 2  # a backward pass through its logits for the gradient of inputs or activations alone
    GRAPH_KEPT = 3  # a backward pass through its logits with create_graph=True
    GRADIENTS = 4  # one that brings gradients to the trained parameters


class Term(IntEnum):
    """How far the penalty term has come since the last step."""

    NONE = 0
    CALLED = 1
    INPUTS = 2  # a backward pass has come through it, for the gradient of inputs or activations alone
    MET = 3  # one that brings gradients to the trained parameters has


class Forward:
    """What is known about one training forward pass, or about one tensor of logits that the penalty term got.

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
        reach: where the last backward pass that named less than all parameters brought gradients to; None before one.
        is_split: whether such passes have brought gradients to inputs alone, and to some of the parameters alone.
        outcome: what it has become.
        is_one_of_several: whether the model returned other tensors that may be the logits.
        prediction: what the forecaster keeps for the backward pass, which only its ``predict`` writes.
        given: what the penalty term keeps for its backward pass.
        losses: what the loss reader has seen of the losses whose gradients have come, and has not counted yet.
    """

    def __init__(self, logits: Tensor, step_number: int, class_dim: int = 1, copies: bool = True) -> None:
        self.class_dim = class_dim if class_dim < logits.ndim else 1
        self.rows = (copy_of_rows if copies else to_rows)(logits.detach(), self.class_dim)
        self.shape = logits.shape
        self.step_number = step_number
        self.output = weakref.ref(logits)
        self.version = version(logits)
        self.may_read = _sync.may_sync(step_number, logits)
        self.nodes: Any = None if logits.grad_fn is None else logits.grad_fn.next_functions
        self.backward = -1
        self.reach: Reach | None = None
        self.is_split = False
        self.outcome = Outcome.OPEN
        self.is_one_of_several = False
        self.prediction: Any = None
        self.given: Any = None
        self.losses: list[Any] = []

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
        term: how far the penalty term has come; changes with calls of ``penalty`` and their backward passes.
        not_finite: whether a batch was skipped because its logits or its gradient were not finite.
        backward: the backward pass that runs, by autograd's number, or that an error has ended; -1 for none.
        trained: a parameter that had a gradient when the last backward pass ended, and how often it was written to.
        changes: how often a training forward pass has found other weights than those that the gradients are of.
        is_zeroed: whether the optimizer's ``zero_grad`` has set gradients to zero in place since the last batch.
        learns: whether the forecaster learns from the next batch: not from a closure's further evaluations.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.forwards: list[weakref.ref[Forward]] = []
        # Changed by forward passes, by gradients of logits and by the penalty term:
        self.stage = Stage.NOTHING
        self.term = Term.NONE
        self.not_finite = False
        # Changed when a backward pass begins and ends, and by forward passes:
        self.backward = -1
        self.trained: tuple[Tensor, int] | None = None
        self.changes = 0
        # Changed by the script's calls of zero_grad and of step with a closure:
        self.is_zeroed = False
        self.learns = True

    # ---- events ------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> bool:
        """The model is called for training; return whether its weights were changed twice without a step."""
        self.stage = max(self.stage, Stage.FORWARD)
        if self.trained is None or not self.learns:
            return False
        parameter, before = self.trained
        now = version(parameter)
        if now == before:
            return False
        self.trained = (parameter, now)
        self.changes += 1
        return self.changes > 1

    def add(self, forward: Forward) -> None:
        """The model has returned logits, or the penalty term has got some."""
        self.forwards = [reference for reference in self.forwards if reference() is not None]
        self.forwards.append(weakref.ref(forward))

    def gradient(self, forward: Forward, base: Optimizer, end: Callable[[], None]) -> bool:
        """A gradient has come to logits; return whether it is one of the training, and goes on to its parameters.

        Args:
            forward: the forward pass of these logits.
            base: the optimizer of the parameters.
            end: is called when the backward pass has ended.
        """
        backward = current_backward()
        if forward.backward == backward != -1:  # each backward pass brings one
            return False
        forward.backward = backward
        if backward not in (-1, self.backward):  # compiled autograd has no number
            call_after_backward(end)
        self.backward = backward
        reach = reach_of_backward(forward.nodes, base)
        if reach is not Reach.ALL:
            if reach is Reach.NOTHING:
                return False
            forward.is_split = forward.is_split or forward.reach not in (None, reach)
            forward.reach = reach
            if reach is Reach.INPUTS:  # as an attack asks for the gradient of its inputs
                self.stage = max(self.stage, Stage.INPUTS)
                return False
        if torch.is_grad_enabled():  # create_graph: a gradient that is part of the script's loss
            self.stage = max(self.stage, Stage.GRAPH_KEPT)
            return False
        if forward.outcome is Outcome.RELEASED:  # of an older step, which is refused
            return True
        self.stage = Stage.GRADIENTS
        self.is_zeroed = False
        return True

    def end_backward(self, base: Optimizer) -> None:
        """The backward pass has ended."""
        self.backward = -1
        if self.stage is Stage.GRADIENTS:
            trained = next((parameter for parameter in parameters_of(base) if parameter.grad is not None), None)
            self.trained = None if trained is None else (trained, version(trained))

    def penalty_called(self, forward: Forward) -> None:
        """The script has called ``penalty`` with these logits."""
        self.term = max(self.term, Term.CALLED)
        forward.outcome = Outcome.GIVEN

    def penalty_met(self) -> None:
        """A backward pass has come through what ``penalty`` returned."""
        self.term = Term.MET

    def penalty_met_for_inputs(self) -> None:
        """One for the gradient of inputs or activations alone has come through it."""
        self.term = max(self.term, Term.INPUTS)

    def batch_missed(self, forward: Forward, is_finite: bool) -> bool:
        """A batch could not be read, or is not finite; return whether it is the first time for these logits."""
        self.not_finite = self.not_finite or not is_finite
        if forward.outcome not in (Outcome.OPEN, Outcome.GIVEN) or not self.learns:
            return False
        forward.outcome = Outcome.MISSED
        return True

    def batch_learned(self, forward: Forward) -> bool:
        """The forecaster may learn from a batch; return whether it does: once, and not from further evaluations."""
        if forward.outcome is Outcome.LEARNED or not self.learns:
            return False
        forward.outcome = Outcome.LEARNED
        return True

    def gradients_cleared(self, in_place: bool) -> None:
        """The script has called ``zero_grad``; gradients that are None are seen in themselves."""
        self.is_zeroed = in_place

    def end_learning(self) -> None:
        """What follows are a closure's further evaluations, elsewhere than the model is."""
        self.learns = False

    def end_evaluations(self) -> None:
        """The closure is not evaluated again, or an error has ended it: the step goes on as before."""
        self.learns = True

    def restart(self) -> None:
        """Gradients were cleared without a step: only forward passes and terms are left whose backward may come."""
        self.stage = min(self.stage, Stage.FORWARD)
        if self.term is Term.MET:
            self.term = Term.NONE
        self.not_finite = False
        self.backward = -1
        self.trained = None
        self.is_zeroed = False
        self.learns = True

    def end(self) -> None:
        """The step is over, and a graph that the script keeps must keep nothing else."""
        for reference in self.forwards:
            forward = reference()
            if forward is not None:
                forward.release()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def were_cleared(self, base: Optimizer, model: nn.Module) -> bool:
        """Whether the gradients of the batches are gone without a step, as where a gradient scaler skips it.

        Those that were there after the backward pass are not there any more. FSDP2 may have had none. A backward pass
        that an error has ended leaves none that a step takes. Gradients that are there after they were cleared the
        script has put there, as gradient surgery does.
        """
        if self.stage < Stage.GRADIENTS or not self.learns:
            return False
        is_running = self.backward != -1
        if is_running and self.backward == current_backward():  # batches that it has brought have no gradients yet
            return False
        if self.trained is None:
            is_cleared = self.is_zeroed or is_running
        else:
            is_cleared = self.is_zeroed or self.trained[0].grad is None
        return is_cleared and not have_gradients(base, model, other_than_zero=self.is_zeroed)

    def forward_of(self, logits: Tensor) -> Forward | None:
        """The forward pass that returned this very tensor, unedited."""
        for reference in self.forwards:
            forward = reference()
            if forward is not None and forward.output() is logits and forward.version == version(logits):
                return forward
        return None

    def forward_like(self, logits: Tensor, may_read: bool) -> Forward | None:
        """The one forward pass that returned such logits and is open, or else one that got its penalty.

        DistributedDataParallel and conversions to another dtype return another tensor.

        Args:
            logits: what the script holds.
            may_read: whether values are compared; if not, only those of several of one shape are.
        """
        alive = [forward for reference in self.forwards if (forward := reference()) is not None]
        for outcome in (Outcome.OPEN, Outcome.GIVEN):
            alike = [one for one in alive if one.outcome is outcome and one.shape == logits.shape]
            if may_read or len(alike) > 1:
                alike = [one for one in alike if are_close(one.logits, logits.detach())]
            if len(alike) == 1:
                return alike[0]
        return None

    def without_forwards(self) -> Progress:
        """The same in a copy of the optimizer, whose forward passes are not those of the script."""
        copied = copy.copy(self)
        copied.forwards = []
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
