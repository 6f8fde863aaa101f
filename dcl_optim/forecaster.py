"""The extension point: a forecaster, and what one outside the package imports."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim._rng import RngState, replayed
from dcl_optim._validation import check_tensors
from dcl_optim.distances import Distance, Rows, from_rows, to_rows
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.forward import Forward
from dcl_optim.loss.reader import Loss, Scale

__all__ = ["Forecaster", "Forward", "Loss", "Penalty", "RngState", "check_tensors", "replayed"]


class Penalty(NamedTuple):
    r"""The penalty :math:`\Delta(z, c) = \frac1n \sum_i w_i \delta_i` of one forward pass.

    Attributes:
        rows: the distances :math:`\delta_i` and their gradients.
        number: n, a number or a scalar tensor.
        weights: :math:`w_i`, (N,); None for 1.
        labels: for the training accuracy: the class of each row (N,), K for none, or soft labels (N, K); None if they
            are not known.
    """

    rows: Rows
    number: float | Tensor
    weights: Tensor | None = None
    labels: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The penalty itself, a scalar."""
        distances = self.rows.distances
        return (distances if self.weights is None else distances * self.weights).sum() / self.number

    def added_to(self, gradient: Tensor, scale: Scale, weight: float, class_dim: int) -> Tensor:
        r"""Add :math:`s\lambda\,\partial\Delta/\partial z` to a gradient of the logits.

        The sum is computed in the wider of the two dtypes, and has the dtype of the gradient.
        """
        slope, factor, radius = self.rows.slope, weight * self.rows.factor, self.rows.radius
        if isinstance(self.number, Tensor):
            scale = scale / self.number
        else:
            factor /= self.number
        if self.weights is not None:
            scale = self.weights * scale
        add = torch.addcmul
        if radius != math.inf:
            norms, add = self.rows.values.clamp(min=radius), torch.addcdiv
            if isinstance(scale, Tensor):
                factor, scale = factor * radius, norms / scale
            else:
                factor, scale = factor * radius * scale, norms
        if isinstance(scale, Tensor) and scale.ndim:
            scale = scale[:, None]
        if gradient.ndim != 2 or class_dim != 1:
            scale = from_rows(scale.expand_as(slope), gradient.shape, class_dim) if isinstance(scale, Tensor) else scale
            slope = from_rows(slope, gradient.shape, class_dim)
        out = None if gradient.dtype == slope.dtype else torch.empty_like(gradient)
        if isinstance(scale, Tensor):
            return add(gradient, slope, scale, value=factor, out=out)
        return torch.add(gradient, slope, alpha=factor * scale, out=out)


class Forecaster(ABC):
    r"""Predicts the logits c that the model is pulled towards, and learns from the model's logits z.

    For each training forward pass of the model, in this order:

    1. :meth:`before_forward` as the model is called;
    2. :meth:`predict` when it has returned;
    3. :meth:`penalty` at each backward pass through its logits;
    4. :meth:`observe` at the first of them, or :meth:`skip`.

    :meth:`step` follows each step of the base optimizer; :meth:`forget` a step that a gradient scaler skipped.

    Attributes:
        replays_draws: whether the RNG state is to be captured before the forward pass, so that it can be replayed.
        group: the ranks that train the model together; None for one process.
    """

    replays_draws = True
    group: DataParallelGroup | None = None

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: RngState, step: int) -> None:  # noqa: B027
        """Prepare for the training forward pass that begins. Default: nothing.

        Args:
            args, kwargs: the arguments of the model.
            rng_state: the state that the model's forward pass draws from; empty without ``replays_draws``.
            step: the number of the optimizer step that the batch belongs to, from 1.
        """

    @abstractmethod
    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, rng_state: RngState) -> None:
        """Put into ``forward.prediction`` what :meth:`penalty` needs, by default a tensor of the logits' shape.

        Args:
            args, kwargs, rng_state, forward: as in :meth:`before_forward`, and the forward pass that has returned.
        """

    def penalty(self, forward: Forward, loss: Loss, distance: Distance) -> Penalty:
        r"""The penalty :math:`\Delta(z, c)` of a forward pass, which a further backward pass asks for again.

        Args:
            forward: the forward pass; its ``logits`` and ``rows`` must not change.
            loss: the loss scale, labels and class dimension that the gradient shows.
            distance: the distance, row by row.
        """
        c = to_rows(forward.prediction.detach(), loss.class_dim)
        return Penalty(distance.rows(forward.rows, c), max(len(c), 1))

    @abstractmethod
    def observe(self, forward: Forward, loss: Loss, penalty: Penalty, distance: Distance, alpha: float) -> None:
        """Learn from a forward pass at its first backward pass, now or in :meth:`step`.

        Args:
            forward, loss, distance, alpha: as in :meth:`penalty`, and the value of this step, in [0, 1].
            penalty: what :meth:`penalty` returned; it was added to the gradient already, and may be overwritten.
        """

    def skip(self, forward: Forward, alpha: float) -> None:  # noqa: B027
        """Note a forward pass that is not observed: its gradient is zero, not finite or has no labels.

        Default: nothing. A forecaster that communicates with other ranks in its step has to do so also then.
        """

    def figures(self) -> dict[str, Any]:
        """Numbers or scalar tensors for the optimizer's ``logs``, always the same keys. Default: none."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What the optimizer's repr shows. Default: nothing."""
        return {}

    def before_step(self, creates_state: bool = False) -> None:  # noqa: B027
        """Prepare before the base optimizer steps. Default: nothing.

        Args:
            creates_state: whether torch.distributed.checkpoint creates the state to load into; create yours too.
        """

    @abstractmethod
    def step(self) -> None:
        """Learn from what was observed since the last step, if anything was."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was observed since the last step."""

    def follow(self, change: str) -> None:  # noqa: B027
        """Follow a change that the script has made. Default: nothing.

        Args:
            change: ``"loaded"``: a state was loaded into the model; ``"added"``: parameters were added to the base
                optimizer, and are removed if this raises; ``"train"`` or ``"eval"``: the base optimizer's mode.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resumption needs, in types that ``torch.load(weights_only=True)`` reads."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit, before anything is changed. Default: as :func:`check_tensors`."""
        check_tensors(state, self.state_dict(), type(self).__name__)

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`check_state` let pass."""
