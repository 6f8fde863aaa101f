"""Distances between logits, one value a row; and the companion's target.

Letters: z are the model's logits, c the prediction that it is compared with (the companion's logits or a class
prototype), N the number of rows, K the number of classes. A *row* is one prediction: a sample, a pixel, a token. An
entry of z - c that is not finite contributes nothing: a masked class is minus infinity in z, and in c where it has
no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim.penalty.layout import difference, wide
from dcl_optim.pytorch.internals import constant

Distance = Callable[[Tensor, Tensor], Tensor]
DistanceName = Literal["mse", "squared", "l1", "kl", "infonce"]


class SquaredDistance:
    r"""Squared distance of logits that grows linearly from a radius on; its gradient is written out in pull.py.

    .. math:: \delta(z_i, c_i) = m_i\,(2\,\lVert z_i - c_i\rVert - m_i)/K, \qquad
        m_i = \min(\lVert z_i - c_i\rVert, \rho K)

    with no radius for a single output (K = 1). A call gives one value a row, (N,).

    Args:
        name: what the optimizer's repr calls it.
        radius: :math:`\rho > 0`, or infinity.
        z, c: of a call: rows (N, K).

    Examples:
        >>> SquaredDistance("nearly absolute", 0.01)(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 3.0]]))
        tensor([0.0198])
        >>> mse(torch.tensor([[1.0, 3.0], [8.0, 6.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
        tensor([ 1.0000, 13.1421])
        >>> squared(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([2.5000])
    """

    def __init__(self, name: str, radius: float) -> None:
        self.__name__ = name
        self.radius = radius

    def __call__(self, z: Tensor, c: Tensor) -> Tensor:
        radius, factor = self.sizes(z.shape[1])
        return huber(torch.linalg.vector_norm(difference(z, c), dim=1), radius) * factor

    def sizes(self, num_classes: int) -> tuple[float, float]:
        """The length of z - c from which on it is linear, and what half of the squared length is multiplied by."""
        radius = self.radius * num_classes if num_classes > 1 else math.inf
        return radius, 2.0 / max(num_classes, 1)


mse = SquaredDistance("mse", 1 / math.sqrt(2.0))
r"""The default, linear from the distance :math:`K/\sqrt2` on, where the gradient is as long as a cross-entropy can make
it."""

squared = SquaredDistance("squared", math.inf)
r"""The paper's, :math:`\lVert z_i - c_i\rVert^2/K`. The paper writes :math:`\lVert z-c\rVert^2/2` per sample in Section
3.2, and calls it MSE, which is this mean."""


def l1(z: Tensor, c: Tensor) -> Tensor:
    r"""Absolute distance of logits, :math:`\lVert z_i - c_i\rVert_1/K`, of the paper's Table 6.

    Args:
        z, c: rows (N, K).

    Returns:
        One value a row, (N,).

    Examples:
        >>> l1(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([1.5000])
    """
    return difference(z, c).abs().mean(1)


def kl(z: Tensor, c: Tensor, temperature: float = 4.0) -> Tensor:
    r"""Divergence of the softened predictions, :math:`\mathrm{KL}(\sigma(c_i/T)\,\Vert\,\sigma(z_i/T))`.

    The paper's Table 6; temperature 4 and no factor :math:`T^2` is what its authors ran. For another temperature pass
    ``functools.partial(kl, temperature=2.0)`` as ``distance``.

    Args:
        z, c: rows (N, K).
        temperature: T > 0, default 4.

    Returns:
        One value a row, (N,).

    Examples:
        >>> kl(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([0.])
    """
    is_masked = (z == -torch.inf) | (c == -torch.inf)
    z = z.masked_fill(is_masked, -torch.inf)
    c = c.masked_fill(is_masked, -torch.inf)
    log_p = F.log_softmax(c / temperature, dim=1)
    log_q = F.log_softmax(z / temperature, dim=1)
    return (log_p.exp() * difference(log_p, log_q)).sum(1)  # p log(p / q) is 0 where p and q are


def infonce(z: Tensor, c: Tensor, temperature: float = 0.1) -> Tensor:
    r"""Contrastive distance in the batch: row i of z and row i of c are the positive pair, by cosine similarity.

    .. math:: -\log\frac{\exp(\cos(z_i,c_i)/T)}{\sum_j\exp(\cos(z_i,c_j)/T)}

    The paper's Table 6, without a temperature. Classes of minus infinity are left out of the similarity. Rows of c that
    are zero, as those of DCP without a label or a prototype, are left out of the other rows' sums.

    Args:
        z, c: rows (N, K).
        temperature: T > 0, default 0.1.

    Returns:
        One value a row, (N,).

    Examples:
        >>> infonce(torch.eye(2), torch.eye(2), temperature=1.0)
        tensor([0.3133, 0.3133])
    """
    z = z.masked_fill((z == -torch.inf) | (c == -torch.inf), 0.0)
    c = c.masked_fill(c == -torch.inf, 0.0)
    similarity = F.normalize(z, dim=1) @ F.normalize(c, dim=1).T / temperature
    is_another = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = similarity.masked_fill(is_another & (c == 0).all(1), -torch.inf)
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device), reduction="none")


DISTANCES: dict[str, Distance] = {"mse": mse, "squared": squared, "l1": l1, "kl": kl, "infonce": infonce}


def resolve_distance(distance: DistanceName | Distance) -> Distance:
    """Turn the argument that a user writes into a function.

    Args:
        distance: one of ``DISTANCES``, or a function (z, c) of rows (N, K) that returns one value a row, (N,).

    Examples:
        >>> resolve_distance("l1")(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([1.])
    """
    if isinstance(distance, str):
        if distance not in DISTANCES:
            names = ", ".join(DISTANCES)
            raise ValueError(f"distance={distance!r} is unknown; choose one of {names}, or pass a function (z, c)")
        return DISTANCES[distance]
    if isinstance(distance, type) or not callable(distance):
        raise TypeError(f"distance={distance!r} must be a name, or a function (z, c) that returns one value a row")
    return distance


def name_of(distance: Distance) -> str:
    """What the optimizer's repr calls a distance."""
    function = getattr(distance, "func", distance)  # of functools.partial
    return getattr(function, "__name__", type(function).__name__)


def huber(norms: Tensor, radius: float) -> Tensor:
    """Half of the square up to a radius, and its tangent beyond."""
    zero = constant(0.0, norms.device).to(norms.dtype)
    return F.huber_loss(norms, zero.expand_as(norms), reduction="none", delta=radius)


def companion_target(z: Tensor, c: Tensor, alpha: float) -> Tensor:
    r"""The logits that the companion learns, :math:`\alpha c + (1-\alpha) z` (Equation 4, Algorithm 1 line 7).

    Exactly c where the two agree: under l1 a rounding error would otherwise be the whole gradient.

    Args:
        z, c, alpha: both networks' logits, and the share of c.

    Examples:
        >>> companion_target(torch.tensor([8.0]), torch.tensor([0.0]), alpha=0.75)
        tensor([2.])
    """
    z = wide(z)
    c = wide(c)
    return torch.where(z == c, c, torch.lerp(c, z, 1.0 - alpha))
