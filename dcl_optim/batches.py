"""Which batches are in the gradients that the next optimizer step uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcl_optim._optim import gradients_of

BYPASSED = (
    "{name} wraps the optimizer, but the base {base} was stepped twice: prototypes and companion learn nothing.\n"
    "  Fix: call step() of the wrapper, optimizer = {name}(optimizer, model), also in trainers and schedulers. "
    "strict=False allows such steps. See docs/get-started.md"
)


class StepBatches:
    """What has happened since the last optimizer step; as a context manager, the step of the base optimizer.

    Args:
        base, name: the optimizer whose gradients are meant, and the name of its wrapper.

    Attributes:
        count: backward passes through the logits of training forward passes.
        observing: whether the forecaster observes forward passes; not evaluations inside the base optimizer's step.
        stepping: whether the base optimizer is in its step, and no closure evaluates the model for it.
        cleared: whether ``zero_grad`` ran since the last of these backward passes.
        backward: the last backward pass that brought a gradient to logits, counted or not, by autograd's number.
        penalties: weighted ones of the evaluation that runs, if LBFGS needs their value.
        not_finite: whether a batch was skipped, since its gradient was not finite.
        forwards, backwards: training forward passes, and backward passes through their logits, of all steps.
        before: both numbers as the step began.
        inside: whether the wrapper steps the base optimizer.
    """

    def __init__(self, base: Optimizer, name: str) -> None:
        self._base, self._name = base, name
        self.forwards = self.backwards = 0
        self.penalties: list[Tensor] | None = None
        self.inside, self._bypassed = False, 0
        self.start()

    def start(self) -> None:
        """Begin with no batch."""
        self.count, self.backward = 0, -1
        self.observing, self.stepping = True, False
        self.cleared = self.not_finite = False
        self.terms = self.terms_used = 0
        self.open: list[Any] = []
        self.before = self.forwards, self.backwards

    def have_gradients(self) -> bool:
        """Whether any parameter that the base optimizer trains has a gradient."""
        return next(gradients_of(self._base), None) is not None

    def are_gone(self, backward: int = -1) -> bool:
        """Whether gradients were cleared without a step, as where a gradient scaler skips it.

        Args:
            backward: the backward pass that runs; batches that it has brought have no gradients yet.
        """
        if not self.count or not self.observing or self.backward == backward:
            return False
        return self.cleared or not self.have_gradients()

    def were_cleared(self) -> bool:
        """As :meth:`are_gone`, before a step: gradients that are there after ``zero_grad`` the script has put there."""
        if not self.count:
            return False
        gradients = gradients_of(self._base)
        return not any(map(torch.any, gradients)) if self.cleared else next(gradients, None) is None

    def refuse_bypass(self) -> None:
        """Called before a step of the base optimizer that the wrapper does not take: raise in the second in a row."""
        self._bypassed += self.count > 0
        if self._bypassed > 1:
            raise RuntimeError(BYPASSED.format(name=self._name, base=type(self._base).__name__))

    def __enter__(self) -> None:
        """The base optimizer steps. If there is no batch, its first evaluation (GSAM) is observed."""
        self.stepping, self.observing, self.inside, self._bypassed = True, not self.count, True, 0

    def __exit__(self, kind: Any, *exception: object) -> None:
        """Begin anew, or go on as before if the step has raised."""
        self.observing, self.stepping, self.penalties, self.inside = True, False, None, False
        if kind is None:
            self.start()
