"""One training forward pass of the model, from the call to its last backward pass."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class Forward:
    """What the parts of the algorithm know about one training forward pass. Each attribute has one writer.

    Args:
        logits: the model's logits z, of any shape with the batch first.
        step: the number of the optimizer step that the pass belongs to, from 1.

    Attributes:
        logits: z, a detached copy that in-place edits by the script do not reach.
        nodes: the autograd nodes that a gradient of the logits goes on to; None if the logits are a parameter.
        counted: whether a backward pass has come.
        added_in: the number of the backward pass that the penalty was added to last. The algorithm writes these three.
        targets: the labels that the script gave, or None.
        own_loss: the number of a backward pass, and the gradient that arrived in it at a loss that the model computed.
        hides_gradient: whether the model's own loss sends no gradient to the logits.
        rows: z as rows (N, K), once the class dimension is known. The loss reader writes these four.
        prediction: what the forecaster keeps for the backward pass, which only it writes.
    """

    def __init__(self, logits: Tensor, step: int) -> None:
        self.logits, self.step = logits.detach().clone(), step
        self.output = weakref.ref(logits)
        self.nodes: Any = None if logits.grad_fn is None else logits.grad_fn.next_functions
        self.counted = self.hides_gradient = False
        self.added_in = -1
        self.targets: Tensor | None = None
        self.own_loss: tuple[int, Tensor] | None = None
        self.rows = self.logits
        self.prediction: Any = None
