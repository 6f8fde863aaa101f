"""What the companion says of a batch, checked against what the model said."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dcl_optim.forecaster import Forward


@dataclass(frozen=True)
class Forecast:
    """What the companion says of a batch.

    Attributes:
        rows: its logits as rows (N, K), without a graph.
        chased: those that it learns from, the first ones, with their graph; None if it does not learn.
        shape: the shape of its logits.
        batch: the samples that it was given, where it learns from a part of them.
    """

    rows: Tensor
    chased: Tensor | None
    shape: tuple[int, ...]
    batch: int | None = None

    def check(self, forward: Forward, fraction: float) -> None:
        """Raise ValueError if this is no forecast of what the model said."""
        if self.batch is not None and not self.batch == self.shape[0] == forward.shape[0]:
            raise ValueError(
                f"companion_fraction={fraction} needs every input and the logits to have the batch as their first "
                "dimension"
            )
        if self.shape != tuple(forward.shape):
            raise ValueError(
                f"companion gives logits of shape {self.shape} where the model gives {tuple(forward.shape)}; its "
                "architecture is free, its output shape is not. If the model's head was replaced, wrap the model again"
            )
