"""Distances between logits, one value a row, with their gradients; and the companion's target.

Letters: z are the model's logits, c the prediction that it is compared with (the companion's logits or a class
prototype), N the number of rows, K the number of classes. A *row* is one prediction: a sample, a pixel, a token. An
entry of z - c that is not finite contributes nothing: masked classes are minus infinity on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Distance = Callable[[Tensor, Tensor], Tensor]
DistanceName = Literal["mse", "squared", "l1", "kl", "infonce"]

RADIUS = 1 / math.sqrt(2.0)  # of mse, for each class


def mse(z: Tensor, c: Tensor) -> Tensor:
    r"""Squared distance of logits, linear for distant rows: :math:`m_i\,(2\,\lVert z_i - c_i\rVert - m_i)/K` with
    :math:`m_i = \min(\lVert z_i - c_i\rVert, K/\sqrt2)`.

    It is :func:`squared` up to the distance :math:`K/\sqrt2` of a row, where the gradient is as long as a cross-entropy
    can make it, and for a single output (K = 1).

    Args:
        z, c: rows (N, K).

    Returns:
        One value a row, (N,).

    Examples:
        >>> mse(torch.tensor([[1.0, 3.0], [8.0, 6.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
        tensor([ 1.0000, 13.1421])
    """
    norms = torch.linalg.vector_norm(difference(z, c), dim=1)
    return _huber(norms, radius_of(z.shape[1])) * (2.0 / max(z.shape[1], 1))


def squared(z: Tensor, c: Tensor) -> Tensor:
    r"""Squared distance of logits, :math:`\lVert z_i - c_i\rVert^2/K`, which is the paper's.

    The paper writes :math:`\lVert z-c\rVert^2/2` per sample (Section 3.2); its experiments use this mean.

    Args:
        z, c: rows (N, K).

    Returns:
        One value a row, (N,).

    Examples:
        >>> squared(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([2.5000])
    """
    return difference(z, c).square().mean(1)


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
    c = c.masked_fill(z == -torch.inf, -torch.inf)  # a class that is masked here has no prototype
    log_p = F.log_softmax(c / temperature, dim=1)
    log_q = F.log_softmax(z / temperature, dim=1)
    # p log(p / q) is 0 where p is, also where q is 0 too and the logarithm is none.
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)).sum(1)


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
    z = z.masked_fill(z == -torch.inf, 0.0)
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
            names = ", ".join(get_args(DistanceName))
            raise ValueError(f"distance={distance!r} is unknown; choose one of {names}, or pass a function (z, c)")
        return DISTANCES[distance]
    if isinstance(distance, type):
        raise TypeError(f"distance={distance.__name__} is a class; pass a function (z, c) that returns one value a row")
    if not callable(distance):
        raise TypeError(f"distance must be a name or a function (z, c), got {type(distance).__name__}")
    return distance


def name_of(distance: Distance) -> str:
    """What the optimizer's repr calls a distance."""
    function = getattr(distance, "func", distance)  # of functools.partial
    return getattr(function, "__name__", type(function).__name__)


class Rows(NamedTuple):
    r"""The distances of N rows, and their gradients with respect to the first argument.

    The gradient of row i is ``slope[i] * factor / lengths[i]``.

    Attributes:
        values: called without arguments, it gives the distances, (N,): only logs and the penalty term ask for them.
        slope: (N, K), in float32 or wider.
        factor: a number.
        lengths: (N,); None for 1.
        norms: of the rows of slope, (N,), where slope is z - c; else None.
    """

    values: Callable[[], Tensor]
    slope: Tensor
    factor: float = 1.0
    lengths: Tensor | None = None
    norms: Tensor | None = None


def rows_of(distance: Distance, z: Tensor, c: Tensor) -> Rows:
    """The distances of rows (N, K) and their gradients for z, with c held constant; no graph is used or kept.

    Args:
        distance: a function (z, c) that returns one value a row.
        z, c: rows (N, K).

    Examples:
        >>> rows_of(squared, torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])).values()
        tensor([2.5000])
    """
    if distance is mse or distance is squared:  # in every step by default, so written out
        apart = difference(z, c)
        norms = torch.linalg.vector_norm(apart, dim=1)
        return _squared_rows(apart, norms, radius_of(z.shape[1]) if distance is mse else math.inf)
    return _differentiated(distance, z, c)


def rows_towards_target(distance: Distance, z: Tensor, c: Tensor, rows: Rows, alpha: float) -> Rows:
    r"""The gradients of :math:`\delta(c, \alpha c + (1-\alpha) z)` for c; the values are not those of the target.

    Args:
        distance: a function (z, c) that returns one value a row.
        z, c: rows (N, K).
        rows: what :func:`rows_of` gave for z and c, whose slope may be used again.
        alpha: the share of c in the target.
    """
    if rows.norms is None:
        return _differentiated(distance, c, companion_target(z, c, alpha))
    # c less its target is z - c times -(1 - alpha): one difference serves both gradients.
    share = 1.0 - alpha
    radius = math.inf
    if distance is mse and share > 0.0:
        radius = radius_of(z.shape[1]) / share
    towards = _squared_rows(rows.slope, rows.norms, radius)
    return towards._replace(factor=-share * towards.factor)


def _squared_rows(apart: Tensor, norms: Tensor, radius: float) -> Rows:
    factor = 2.0 / max(apart.shape[1], 1)
    if radius == math.inf:
        return Rows(lambda: norms.square() * (0.5 * factor), apart, factor, None, norms)
    lengths = norms.clamp(min=radius)
    return Rows(lambda: _huber(norms, radius) * factor, apart, factor * radius, lengths, norms)


def _differentiated(distance: Distance, z: Tensor, c: Tensor) -> Rows:
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
    slope = slope.contiguous().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return Rows(values.detach, slope)


def radius_of(num_classes: int) -> float:
    """The distance up to which :func:`mse` is the square."""
    return RADIUS * num_classes if num_classes > 1 else math.inf


def _huber(norms: Tensor, radius: float) -> Tensor:
    """Half of the square up to a radius, and its tangent beyond."""
    near = norms.clamp(max=radius)
    return near * torch.sub(norms, near, alpha=0.5)


def difference(z: Tensor, c: Tensor) -> Tensor:
    """Subtract c from z in float32 or wider; 0 where that is not finite.

    Examples:
        >>> difference(torch.tensor([1.0, -torch.inf]), torch.tensor([3.0, -torch.inf]))
        tensor([-2.,  0.])
    """
    subtracted = z - c if z.dtype.itemsize >= 4 else z.float().sub_(c)
    if subtracted.requires_grad:
        return subtracted.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return subtracted.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


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


def to_rows(tensor: Tensor, class_dim: int = 1) -> Tensor:
    """Flatten logits of any shape to rows, the classes last: (batch, K, ...) becomes (N, K).

    Args:
        tensor: logits; one dimension is N rows of a single value.
        class_dim: the dimension that holds the classes. Default 1, as in ``F.cross_entropy``.

    Examples:
        >>> to_rows(torch.zeros(2, 10, 4, 4)).shape
        torch.Size([32, 10])
    """
    if tensor.ndim == 2 and class_dim == 1:
        return tensor
    if tensor.ndim < 2:
        return tensor.reshape(-1, 1)
    return tensor.movedim(class_dim, -1).reshape(-1, tensor.shape[class_dim])


def from_rows(rows: Tensor, shape: tuple[int, ...], class_dim: int = 1) -> Tensor:
    """Undo :func:`to_rows`.

    Args:
        rows, shape: (N, K), and the shape to give back.
        class_dim: the dimension that holds the classes.

    Examples:
        >>> from_rows(torch.zeros(32, 10), (2, 10, 4, 4)).shape
        torch.Size([2, 10, 4, 4])
    """
    if len(shape) == 2 and class_dim == 1:
        return rows
    if len(shape) < 2:
        return rows.reshape(shape)
    return rows.reshape(*shape[:class_dim], *shape[class_dim + 1 :], shape[class_dim]).movedim(-1, class_dim)


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 or wider.

    Args:
        tensor: of floating point.

    Examples:
        >>> wide(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
