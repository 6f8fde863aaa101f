"""The penalty of one forward pass with its gradient: what a forecaster returns and learns from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcl_optim.penalty.distances import Distance, SquaredDistance, companion_target, huber, name_of
from dcl_optim.penalty.layout import difference, from_rows, to_rows, wide
from dcl_optim.pytorch.internals import constant

Scale = float | Tensor


class Pull(NamedTuple):
    r"""The penalty of a batch, the mean :math:`\Delta(z, c) = \frac1n\sum_i w_i\,\delta(z_i, c_i)`, and its gradient.

    The gradient for row i of z is ``slope[i] * factor * weights[i]``, and times ``radius / norms[i]`` where that is
    below 1. It is not multiplied out: one kernel then multiplies it by the factor on the loss and the weight too, and
    adds it to the gradient of the loss.

    Attributes:
        value: called with a factor, or without one for 1, it gives the penalty times that, a scalar: only logs and the
            term ask for it.
        slope: (N, K), in float32 or wider.
        factor: a number.
        weights: (N,); None for 1.
        norms: of the rows of slope, (N,), where slope is z - c; else None.
        radius: the norm from which on the distance is linear.
        lesson: what the forecaster learns from, without the labels: it may not read the logits again.
        drawn: where the rows are those of a part of the batch: its numbers along the logits' dimension 0. The others
            are not pulled.
    """

    value: Callable[..., Tensor]
    slope: Tensor
    factor: float
    weights: Tensor | None = None
    norms: Tensor | None = None
    radius: float = math.inf
    lesson: Any = None
    drawn: Tensor | None = None

    def gradient(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        class_dim: int,
        scale: Scale,
        weight: Scale = 1.0,
        *,
        added_to: Tensor | None = None,
        overwrites: bool = False,
    ) -> Tensor:
        r"""Give :math:`s\lambda\,\partial\Delta/\partial z` in a shape and dtype of logits: scale and weight.

        ``added_to`` is another gradient, which it is added to. With ``overwrites`` it takes the memory of the slope.
        """
        factor = self.factor
        of_rows = self.weights
        for given in (scale, weight):
            if isinstance(given, Tensor):
                given = given.to(self.slope)
                of_rows = given if of_rows is None else of_rows * given
            else:
                factor *= given
        if self.norms is not None and self.radius < math.inf:
            factor *= self.radius
            of_rows = (1.0 if of_rows is None else of_rows) / self.norms.clamp(min=self.radius)
        if of_rows is None:
            of_rows = constant(1.0, self.slope.device)
        other = constant(0.0, self.slope.device)
        if added_to is not None and self.drawn is None:
            other = to_rows(added_to, class_dim).to(self.slope.dtype)
        of_rows = of_rows.unsqueeze(1) if of_rows.ndim else of_rows
        out = self.slope if overwrites else None
        rows = torch.addcmul(other, self.slope, of_rows, value=factor, out=out)
        if self.drawn is None:
            return from_rows(rows, shape, class_dim).to(dtype)
        part = from_rows(rows, (len(self.drawn), *shape[1:]), class_dim).to(dtype)
        whole = torch.zeros(shape, dtype=dtype, device=rows.device) if added_to is None else added_to
        return whole.index_add(0, self.drawn, part)


def nothing(logits: Tensor) -> Tensor:
    """A penalty of 0, as outside of training."""
    return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))


def pull_of(
    distance: Distance, z: Tensor, c: Tensor, weights: Tensor | None = None, number: Scale | None = None
) -> Pull:
    r"""The penalty :math:`\frac1n\sum_i w_i\,\delta(z_i, c_i)` of rows, with c held constant; no graph is used or kept.

    Args:
        distance: a function (z, c) of rows that returns one value a row.
        z, c: rows (N, K).
        weights: :math:`w_i`, (N,); None (default) for 1.
        number: n, of which at least 1 is taken; None (default) for N. One on the device goes with weights.

    Examples:
        >>> from dcl_optim.penalty.distances import squared
        >>> pull_of(squared, torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])).value()
        tensor(2.5000)
    """
    divisor = float(max(len(z), 1))
    if isinstance(number, Tensor):
        assert weights is not None
        divisor = 1.0
        weights = weights / number.clamp(min=1)
    elif number is not None:
        divisor = max(number, 1.0)
    if isinstance(distance, SquaredDistance):  # in every step by default, so written out
        return _squared_pull(distance, z, c, weights, divisor)
    return _differentiated_pull(distance, z, c, weights, divisor)


def pull_towards_target(distance: Distance, z: Tensor, c: Tensor, pull: Pull, alpha: float) -> Pull:
    r"""The gradient for c of the mean :math:`\delta(c, \alpha c + (1-\alpha) z)`; its value is not that of the target.

    Args:
        distance: a function (z, c) of rows that returns one value a row.
        z, c: rows (N, K).
        pull: what :func:`pull_of` gave for z and c.
        alpha: the share of c in the target.
    """
    if pull.norms is None:
        return pull_of(distance, c, companion_target(z, c, alpha))
    # c less its target is z - c times -(1 - alpha): one difference serves both gradients.
    share = 1.0 - alpha
    radius = pull.radius / share if share else math.inf
    return pull._replace(factor=-share * pull.factor, radius=radius, drawn=None)


def _squared_pull(distance: SquaredDistance, z: Tensor, c: Tensor, weights: Tensor | None, number: float) -> Pull:
    slope = difference(z, c)
    norms = torch.linalg.vector_norm(slope, dim=1)
    radius, factor = distance.sizes(slope.shape[1])
    factor /= number

    def value(scale: Scale = 1.0) -> Tensor:
        distances = huber(norms, radius)
        total = distances.sum() if weights is None else torch.dot(distances, weights.to(distances))
        return total * (factor * scale)

    return Pull(value, slope, factor, weights, norms, radius)


def _differentiated_pull(distance: Distance, z: Tensor, c: Tensor, weights: Tensor | None, number: float) -> Pull:
    leaf = wide(z).detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        values = distance(leaf, wide(c).detach())
        if not isinstance(values, Tensor) or values.shape != leaf.shape[:1]:
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"distance={name_of(distance)} must return one value a row, of shape ({len(leaf)},), but returned "
                f"{found}; leave out the mean over the batch, as in (z - c).square().mean(1)"
            )
        (slope,) = torch.autograd.grad(values.sum(), leaf)
    distances = values.detach()
    factor = 1.0 / number
    slope = slope.contiguous().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def value(scale: Scale = 1.0) -> Tensor:
        if weights is None:
            return distances.sum() * (factor * scale)
        return torch.dot(distances.nan_to_num(0.0, 0.0, 0.0), weights.to(distances)) * (factor * scale)

    return Pull(value, slope, factor, weights)
