"""Distances Δ(z, c) between logits, row by row, with their gradients; and the companion's target.

Letters: z are the model's logits, c the prediction that it is compared with (the companion's logits or a class
prototype), N the number of rows, K the number of classes. A *row* is one prediction: a sample, a pixel, a token. An
entry of z - c that is not finite contributes nothing: masked classes are minus infinity on both sides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim._validation import check_positive

Function = Callable[[Tensor, Tensor], Tensor]
DistanceName = Literal["mse", "squared", "l1", "kl", "infonce"]

DISTANCES: tuple[DistanceName, ...] = get_args(DistanceName)
RADIUS = 1 / math.sqrt(2.0)  # of mse, for each class


def mse(z: Tensor, c: Tensor) -> Tensor:
    r"""Squared distance of logits, linear far out: :math:`\frac{1}{NK}\sum_i m_i\,(2\,\lVert z_i - c_i\rVert - m_i)`
    with :math:`m_i = \min(\lVert z_i - c_i\rVert, K/\sqrt2)`.

    It is :func:`squared` up to the distance :math:`K/\sqrt2` of a row, where the gradient is as long as a cross-entropy
    can make it, and for a single output (K = 1).

    Args:
        z, c: rows (N, K), as in all distances.

    Examples:
        >>> mse(torch.tensor([[1.0, 3.0], [8.0, 6.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
        tensor(7.0711)
    """
    classes = z.shape[1]
    if classes <= 1:
        return squared(z, c)
    return _huber(torch.linalg.vector_norm(difference(z, c), dim=1), RADIUS * classes).mean() * (2.0 / classes)


def squared(z: Tensor, c: Tensor) -> Tensor:
    r"""Squared distance of logits, :math:`\frac{1}{NK}\sum_i\lVert z_i - c_i\rVert^2`, which is the paper's.

    The paper writes :math:`\frac12\lVert z-c\rVert^2` per sample (Section 3.2); its experiments use this mean. Rows are
    those of :func:`mse`.

    Examples:
        >>> squared(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor(2.5000)
    """
    return difference(z, c).square().mean()


def _huber(norms: Tensor, radius: float) -> Tensor:
    """Half of the square up to a radius, and its tangent beyond."""
    near = norms.clamp(max=radius)
    return near * (norms - 0.5 * near)


def l1(z: Tensor, c: Tensor) -> Tensor:
    r"""Absolute distance of rows as in :func:`mse`, :math:`\frac{1}{NK}\sum_i\lVert z_i - c_i\rVert_1`, of Table 6.

    Examples:
        >>> l1(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor(1.5000)
    """
    return difference(z, c).abs().mean()


def kl(z: Tensor, c: Tensor, temperature: float = 4.0) -> Tensor:
    r"""Divergence of the softened predictions, :math:`\frac1N\sum_i\mathrm{KL}(\sigma(c_i/T)\,\Vert\,\sigma(z_i/T))`.

    The paper's Table 6; temperature 4 and no factor :math:`T^2` is what its authors ran.

    Args:
        z, c: rows (N, K).
        temperature: T > 0, default 4.

    Examples:
        >>> kl(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
        tensor(0.)
    """
    log_p = F.log_softmax(c / temperature, dim=1)
    log_q = F.log_softmax(z / temperature, dim=1)
    # p log(p / q) is 0 where p is, also where q is 0 too and the logarithm is none.
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)).sum() / len(z)


def infonce(z: Tensor, c: Tensor, temperature: float = 0.1) -> Tensor:
    r"""Contrast inside the batch: row i of z must find row i of c among all rows of c by cosine similarity.

    .. math:: -\frac1N\sum_i \log\frac{\exp(\cos(z_i,c_i)/T)}{\sum_j\exp(\cos(z_i,c_j)/T)}

    The paper's Table 6, without a temperature. Classes of minus infinity are left out of the similarity.

    Args:
        z, c: rows (N, K).
        temperature: T > 0, default 0.1.

    Examples:
        >>> infonce(torch.eye(2), torch.eye(2), temperature=1.0)
        tensor(0.3133)
    """
    z, c = (rows.masked_fill(rows == -torch.inf, 0.0) for rows in (z, c))
    similarity = F.normalize(z, dim=1) @ F.normalize(c, dim=1).T / temperature
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device))


def difference(z: Tensor, c: Tensor) -> Tensor:
    """Subtract c from z in float32 or wider; 0 where that is not finite. Rows are those of :func:`mse`.

    Examples:
        >>> difference(torch.tensor([1.0, -torch.inf]), torch.tensor([3.0, -torch.inf]))
        tensor([-2.,  0.])
    """
    found = z - c if z.dtype.itemsize >= 4 else z.float().sub_(c)
    if found.requires_grad:
        return found.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return found.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def companion_target(z: Tensor, c: Tensor, alpha: float) -> Tensor:
    r"""The logits that the companion learns, :math:`\alpha c + (1-\alpha) z` (Equation 4, Algorithm 1 line 7).

    Exactly c where the two agree: under l1 a rounding error would otherwise be the whole gradient.

    Args:
        z, c, alpha: both networks' logits, and the share of c.

    Examples:
        >>> companion_target(torch.tensor([8.0]), torch.tensor([0.0]), alpha=0.75)
        tensor([2.])
    """
    z, c = wide(z), wide(c)
    return torch.where(z == c, c, torch.lerp(c, z, 1.0 - alpha))


class Rows(NamedTuple):
    r"""The distances :math:`\delta_i` of N rows, and their gradients with respect to z.

    Attributes:
        values: the distances, (N,).
        slope, factor: the gradients are their product; (N, K) in float32 or wider, and a number.
        are_norms: whether ``values`` are the norms of the rows of ``slope``, whose Huber loss is the distance.
        radius: with ``are_norms``, the norm that a row of the gradient is cut to.
    """

    values: Tensor
    slope: Tensor
    factor: float
    are_norms: bool = False
    radius: float = math.inf

    @property
    def distances(self) -> Tensor:
        r""":math:`\delta_i`, (N,)."""
        return _huber(self.values, self.radius) * self.factor if self.are_norms else self.values


class Distance(ABC):
    r"""A distance :math:`\Delta(z, c) = \sum_i w_i \delta_i`; with weights of 1/N it is the mean over rows."""

    name = ""
    couples_rows = False  # whether a row's distance depends on the other rows
    depends_on_class_dim = True  # whether it is another one if a wrong dimension is taken for the classes

    @abstractmethod
    def rows(self, z: Tensor, c: Tensor) -> Rows:
        """The distances of rows (N, K) and their gradients, with c held constant; no graph is used or kept."""

    def __str__(self) -> str:
        return self.name or repr(self)

    def towards_target(self, z: Tensor, c: Tensor, found: Rows, alpha: float) -> Rows:
        r"""The gradients of :math:`\delta(c, \alpha c + (1-\alpha) z)` for c; may overwrite ``found``, the rows."""
        return self.rows(c, companion_target(z, c, alpha))


@dataclass(frozen=True)
class SquaredDistance(Distance):
    """:func:`mse` by rows.

    Args:
        bounded: False for :func:`squared`.
    """

    bounded: bool = True
    depends_on_class_dim = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return "mse" if self.bounded else "squared"

    def rows(self, z: Tensor, c: Tensor) -> Rows:
        apart, classes = difference(z, c), z.shape[1]
        radius = RADIUS * classes if self.bounded and classes > 1 else math.inf
        return Rows(torch.linalg.vector_norm(apart, dim=1), apart, 2.0 / max(classes, 1), True, radius)

    def towards_target(self, z: Tensor, c: Tensor, found: Rows, alpha: float) -> Rows:
        # One difference serves both gradients: that to the target is 1 - alpha times as long.
        share = 1.0 - alpha
        return found._replace(factor=-share * found.factor, radius=found.radius / share if share else math.inf)


class AbsoluteDistance(Distance):
    """:func:`l1` by rows."""

    name = "l1"
    depends_on_class_dim = False

    def rows(self, z: Tensor, c: Tensor) -> Rows:
        apart, factor = difference(z, c), 1.0 / max(z.shape[1], 1)
        return Rows(apart.abs().sum(1) * factor, apart.sign_(), factor)


@dataclass(frozen=True)
class Divergence(Distance):
    """:func:`kl` by rows."""

    name = "kl"
    temperature: float = 4.0

    def rows(self, z: Tensor, c: Tensor) -> Rows:
        c = wide(c).masked_fill(z == -torch.inf, -torch.inf)  # a class that is masked here has no prototype
        log_p = F.log_softmax(c / self.temperature, dim=1)
        log_q = F.log_softmax(wide(z) / self.temperature, dim=1)
        p = log_p.exp()
        values = torch.nansum(p * difference(log_p, log_q), 1)
        return Rows(values, difference(log_q.exp_(), p), 1.0 / self.temperature)


@dataclass(frozen=True)
class MeanDistance(Distance):
    """A function that autograd differentiates, such as :func:`infonce`.

    Args:
        function: (z, c) -> scalar, a mean over rows.

    Examples:
        >>> MeanDistance(squared).rows(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])).slope
        tensor([[1., 2.]])
    """

    function: Function
    couples_rows = True

    def __str__(self) -> str:
        function = getattr(self.function, "func", self.function)
        return getattr(function, "__name__", type(function).__name__)

    def rows(self, z: Tensor, c: Tensor) -> Rows:
        leaf, c, number = wide(z).detach().requires_grad_(), wide(c).detach(), len(z)
        with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
            value = self.function(leaf, c)
            if value.ndim != 0:
                shape = tuple(value.shape)
                raise ValueError(f"distance must return a scalar, got shape {shape}; reduce it, e.g. .mean()")
            (gradient,) = torch.autograd.grad(value, leaf)
        gradient = gradient.contiguous().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return Rows(value.detach().expand(number), gradient, float(number))


def resolve_distance(distance: DistanceName | Distance | Function, temperature: float | None = None) -> Distance:
    """Turn the arguments that a user writes into a :class:`Distance`.

    Args:
        distance: one of ``DISTANCES``, or any callable ``(z, c) -> scalar`` that is a mean over rows.
        temperature: for kl and infonce only; None takes 4 and 0.1.

    Examples:
        >>> resolve_distance("l1").rows(torch.zeros(1, 2), torch.ones(1, 2)).distances
        tensor([1.])
    """
    if isinstance(distance, str) and distance not in DISTANCES:
        raise ValueError(f"distance={distance!r} is unknown; choose one of {', '.join(DISTANCES)}, or pass a callable")
    if temperature is not None:
        check_positive("temperature", temperature)
        if distance not in ("kl", "infonce"):
            raise ValueError(f"temperature={temperature!r} is for distance 'kl' or 'infonce', not {distance!r}")
    options: dict[str, Any] = {} if temperature is None else {"temperature": float(temperature)}
    if distance in ("mse", "squared"):
        return SquaredDistance(bounded=distance == "mse")
    if distance == "l1":
        return AbsoluteDistance()
    if distance == "kl":
        return Divergence(**options)
    if distance == "infonce":
        return MeanDistance(partial(infonce, **options))
    if isinstance(distance, Distance):
        return distance
    if not callable(distance):
        raise TypeError(f"distance must be a name or a callable (z, c) -> scalar, got {type(distance).__name__}")
    return MeanDistance(distance)


def to_rows(tensor: Tensor, class_dim: int = 1) -> Tensor:
    """Flatten logits of any shape to rows, the classes last: (batch, K, ...) becomes (N, K).

    Args:
        tensor: logits; one dimension is N rows of a single value.
        class_dim: the dimension that holds the classes. Default 1, as in ``F.cross_entropy``.

    Examples:
        >>> to_rows(torch.zeros(2, 10, 4, 4)).shape
        torch.Size([32, 10])
    """
    if tensor.ndim == 2 and class_dim in (1, -1):
        return tensor
    if tensor.ndim < 2:
        return tensor.reshape(-1, 1)
    return tensor.movedim(class_dim, -1).reshape(-1, tensor.shape[class_dim])


def from_rows(rows: Tensor, shape: tuple[int, ...], class_dim: int = 1) -> Tensor:
    """Undo :func:`to_rows`.

    Args:
        rows, shape: (N, K), and the shape to give back.

    Examples:
        >>> from_rows(torch.zeros(32, 10), (2, 10, 4, 4)).shape
        torch.Size([2, 10, 4, 4])
    """
    if len(shape) == 2 and class_dim in (1, -1):
        return rows
    if len(shape) < 2:
        return rows.reshape(shape)
    dim = class_dim % len(shape)
    return rows.reshape(*shape[:dim], *shape[dim + 1 :], shape[dim]).movedim(-1, dim)


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 or wider.

    Args:
        tensor: of floating point.

    Examples:
        >>> wide(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
