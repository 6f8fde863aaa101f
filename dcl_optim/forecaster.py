"""The extension point: a forecaster, and what one outside the package imports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim._sync import Question
from dcl_optim._torch import constant
from dcl_optim._validation import check_tensors
from dcl_optim.distances import Distance, Rows, from_rows, rows_of
from dcl_optim.loss.reader import Labels, Scale
from dcl_optim.step import Forward

__all__ = ["Forecaster", "Forward", "Labels", "Pull", "Question", "Scale", "check_tensors", "pull_of"]


class Pull(NamedTuple):
    r"""The penalty :math:`\Delta(z, c) = \sum_i w_i \delta_i / n` of one forward pass, with its gradient by rows.

    Attributes:
        rows: the distances :math:`\delta_i` and their gradients.
        number: n, a number or a scalar tensor.
        weights: :math:`w_i`, (N,); None for 1.
    """

    rows: Rows
    number: float | Tensor
    weights: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The penalty itself, a scalar."""
        distances = self.rows.values()
        if self.weights is None:
            return distances.sum() / self.number
        return torch.dot(distances.nan_to_num(0.0, 0.0, 0.0), self.weights.to(distances)) / self.number

    def without_slope(self) -> Pull:
        """The same penalty without the memory of its gradient."""
        slope = self.rows.slope
        return self._replace(rows=self.rows._replace(slope=slope.new_empty((0, *slope.shape[1:]))))

    def coefficients(self, *scales: Scale) -> tuple[float, Scale]:
        """What the rows of the slope are multiplied by in the scaled gradient: a number, and a number or (N, 1).

        Args:
            scales: numbers and scalar tensors, all of which multiply the gradient.
        """
        factor = self.rows.factor
        of_rows = self.weights
        for scale in scales:
            if isinstance(scale, Tensor):
                scale = scale.to(self.rows.slope)
                of_rows = scale if of_rows is None else of_rows * scale
            else:
                factor *= scale
        for divisor in (self.number, self.rows.lengths):
            if isinstance(divisor, Tensor):
                of_rows = (1.0 if of_rows is None else of_rows) / divisor
            elif divisor is not None:
                factor /= divisor
        if of_rows is None:
            return factor, 1.0
        return factor, of_rows[:, None] if of_rows.ndim else of_rows

    def added_to(self, gradient: Tensor, class_dim: int, *scales: Scale) -> Tensor:
        r"""Add :math:`s\,\partial\Delta/\partial z` to a gradient of the logits, s being the product of the scales.

        The sum is computed in the wider of the two dtypes, and has the dtype of the gradient.
        """
        slope = self.rows.slope
        factor, of_rows = self.coefficients(*scales)
        if gradient.ndim != 2 or class_dim != 1:
            if isinstance(of_rows, Tensor):
                of_rows = from_rows(of_rows.expand_as(slope), gradient.shape, class_dim)
            slope = from_rows(slope, gradient.shape, class_dim)
        out = None if gradient.dtype == slope.dtype else torch.empty_like(gradient)
        if isinstance(of_rows, Tensor):
            return torch.addcmul(gradient, slope, of_rows, value=factor, out=out)
        return torch.add(gradient, slope, alpha=factor * of_rows, out=out)

    def gradient(
        self, shape: torch.Size, dtype: torch.dtype, class_dim: int, *scales: Scale, overwrites: bool = False
    ) -> Tensor:
        r"""Give :math:`s\,\partial\Delta/\partial z` in a shape and dtype of logits, s being the product of the scales.

        With ``overwrites`` it takes the memory of the slope.
        """
        factor, of_rows = self.coefficients(*scales)
        slope = self.rows.slope
        out = slope if overwrites else None
        if isinstance(of_rows, Tensor):
            rows = torch.addcmul(constant(0.0, slope.device), slope, of_rows, value=factor, out=out)
        else:
            rows = torch.mul(slope, factor * of_rows, out=out)
        return from_rows(rows, shape, class_dim).to(dtype)


class Forecaster(ABC):
    r"""Predicts the logits c that the model is pulled toward, and learns from the model's logits z.

    For each training forward pass of the model, in this order:

    1. :meth:`before_forward` as the model is called;
    2. :meth:`predict` when it has returned;
    3. :meth:`pull` at each backward pass through its logits, or when the penalty term is made;
    4. :meth:`observe` at the first of these backward passes, or :meth:`skip`.

    :meth:`step` follows each step of the base optimizer; :meth:`forget` a step that a gradient scaler skipped.

    Attributes:
        distance: a function (z, c) of rows (N, K) that returns one value a row.
        reads_labels: whether the labels of a batch are needed.
    """

    distance: Distance
    reads_labels = False

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> None:  # noqa: B027
        """Prepare for the training forward pass that begins. Default: nothing.

        Args:
            args, kwargs: the arguments of the model.
            step: the number of the optimizer step that the batch belongs to, from 1.
        """

    def predict(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: B027
        """Put into ``forward.prediction`` what :meth:`pull` needs. Default: nothing.

        Args:
            forward: the forward pass that has returned.
            args, kwargs: the arguments of the model.
        """

    @abstractmethod
    def pull(self, forward: Forward, labels: Labels | None) -> Pull:
        r"""The penalty :math:`\Delta(z, c)` of a forward pass, which a further backward pass asks for again.

        Args:
            forward: the forward pass; its ``logits`` and ``rows`` must not change.
            labels: of its rows; None without ``reads_labels``.
        """

    @abstractmethod
    def observe(self, forward: Forward, pull: Pull, labels: Labels | None, scale: Scale, alpha: float) -> None:
        """Learn from a forward pass at its first backward pass, now or in :meth:`step`.

        Args:
            forward: the forward pass; its ``logits`` and ``rows`` must not change.
            labels: of its rows; None without ``reads_labels``.
            pull: what :meth:`pull` returned; it was added to the gradient already, and may be overwritten.
            scale: what the loss was multiplied by.
            alpha: the value of this step, in [0, 1].
        """

    def skip(self, forward: Forward, alpha: float) -> None:  # noqa: B027
        """Note a forward pass that is not observed: it is not finite, or its loss was not read.

        Default: nothing. A forecaster that communicates with other ranks in its step has to do so also then.
        """

    def measure_accuracy(self) -> None:  # noqa: B027
        """Measure the training accuracy from now on, since the weight follows it. Only with ``reads_labels``."""

    def train_accuracy(self) -> tuple[Tensor, int]:
        """The running mean of the training accuracy, a scalar, and the number of classes.

        Only a forecaster with ``reads_labels`` is asked, after :meth:`measure_accuracy`, and it has to answer.
        """
        raise NotImplementedError

    def questions(self) -> list[Question]:
        """What to ask a device at the end of a step that may read values. Default: nothing."""
        return []

    def figures(self) -> dict[str, Any]:
        """Numbers or scalar tensors for the optimizer's ``logs``, always the same keys. Default: none."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What the optimizer's repr shows. Default: nothing."""
        return {}

    def before_step(self) -> None:  # noqa: B027
        """Prepare before the base optimizer steps. Default: nothing."""

    @abstractmethod
    def step(self) -> None:
        """Learn from what was observed since the last step, if anything was."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was observed since the last step."""

    def create_state(self) -> None:  # noqa: B027
        """Create the state to load into, for torch.distributed.checkpoint. Default: nothing."""

    def model_loaded(self) -> None:  # noqa: B027
        """Called when a state was loaded into the model. Default: nothing."""

    def switch(self, mode: str) -> None:  # noqa: B027
        """Follow the base optimizer to its mode ``"train"`` or ``"eval"``. Default: nothing."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resumption needs, in types that ``torch.load(weights_only=True)`` reads."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit, before anything is changed. Default: as :func:`check_tensors`."""
        check_tensors(state, self.state_dict(), type(self).__name__)

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`check_state` accepted."""


def pull_of(distance: Distance, z: Tensor, c: Tensor) -> Pull:
    r"""The penalty :math:`\sum_i \delta(z_i, c_i) / N` of rows (N, K), with c held constant.

    Args:
        distance: a function (z, c) of rows that returns one value a row.
        z, c: rows (N, K).

    Examples:
        >>> from dcl_optim.distances import squared
        >>> pull_of(squared, torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])).value
        tensor(2.5000)
    """
    return Pull(rows_of(distance, z, c), max(len(z), 1))
