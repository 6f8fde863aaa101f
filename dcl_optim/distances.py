"""Distances Δ(z, c) between logits, and the companion's target: pure functions of tensors.

Letters: z are the model's logits, c the forecast (the companion's logits or a class prototype), N the number of
rows, K the number of classes. A *row* is one prediction: a sample, a pixel, a token. Logits of minus infinity (masked
classes, padded vocabularies) contribute nothing where both sides have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim._validation import check_positive

Distance = Callable[[Tensor, Tensor], Tensor]
DistanceName = Literal["mse", "l1", "kl", "infonce"]

DISTANCES: tuple[DistanceName, ...] = get_args(DistanceName)
DEFAULT_TEMPERATURE = {"kl": 4.0, "infonce": 0.1}


def to_rows(tensor: Tensor, class_dim: int = 1) -> Tensor:
    """Flatten logits of any shape to rows, the classes last: (batch, K, ...) becomes (N, K).

    Args:
        tensor: logits with at least one dimension; a 1-d tensor is N rows of a single value.
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
    """Lay rows out in the shape that :func:`to_rows` flattened.

    Args:
        rows: (N, K).
        shape: the shape to give back, with N·K elements.
        class_dim: as in :func:`to_rows`.

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


def difference(z: Tensor, c: Tensor) -> Tensor:
    """Subtract c from z; 0 where both are the same infinity.

    Args:
        z: logits of any shape.
        c: forecast, same shape.

    Examples:
        >>> difference(torch.tensor([1.0, -torch.inf]), torch.tensor([3.0, -torch.inf]))
        tensor([-2.,  0.])
    """
    found = z - c
    if found.device.type == "cpu" and math.isfinite(found.detach().sum().item()):  # a mask costs ten times the sum
        return found
    return found.masked_fill(z == c, 0.0)


def mse(z: Tensor, c: Tensor) -> Tensor:
    r"""Squared distance of logits, :math:`\frac{1}{NK}\sum_i\lVert z_i - c_i\rVert^2`.

    The paper writes :math:`\frac12\lVert z-c\rVert^2` per sample (Section 3.2), which is K/2 times this. Its
    experiments use the mean over samples and classes, as here.

    Args:
        z: logits, rows of shape (N, K).
        c: forecast, same shape.

    Examples:
        >>> mse(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor(2.5000)
    """
    return difference(z, c).square().sum() / z.numel()


def l1(z: Tensor, c: Tensor) -> Tensor:
    r"""Absolute distance of logits, :math:`\frac{1}{NK}\sum_i\lVert z_i - c_i\rVert_1` (the paper's Table 6).

    Args:
        z, c: as in :func:`mse`.

    Examples:
        >>> l1(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        tensor(1.5000)
    """
    return difference(z, c).abs().sum() / z.numel()


def kl(z: Tensor, c: Tensor, temperature: float = 4.0) -> Tensor:
    r"""Divergence of the softened predictions, :math:`\frac1N\sum_i\mathrm{KL}(\sigma(c_i/T)\,\Vert\,\sigma(z_i/T))`.

    The paper's Table 6; temperature 4 and no factor :math:`T^2` is what its authors ran.

    Args:
        z, c: as in :func:`mse`.
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

    The paper's Table 6 names InfoNCE and no temperature. This is the one-directional form: negatives are forecasts
    only, where the authors' own script also takes the other rows of z. Classes of minus infinity are left out of the
    similarity.

    Args:
        z, c: as in :func:`mse`.
        temperature: T > 0, default 0.1.

    Examples:
        >>> infonce(torch.eye(2), torch.eye(2), temperature=1.0)
        tensor(0.3133)
    """
    z, c = (rows.masked_fill(rows == -torch.inf, 0.0) for rows in (z, c))
    similarity = F.normalize(z, dim=1) @ F.normalize(c, dim=1).T / temperature
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device))


def resolve_distance(distance: DistanceName | Distance, temperature: float | None = None) -> Distance:
    """Turn the arguments a user writes into one function of two (N, K) tensors that gives a scalar.

    Args:
        distance: one of ``DISTANCES`` or any callable ``(z, c) -> scalar``.
        temperature: for kl and infonce only; None takes 4 and 0.1.

    Raises:
        ValueError: an unknown name, or an option that the distance does not have.
        TypeError: a distance that is neither a name nor callable, a temperature that is no number.

    Examples:
        >>> resolve_distance("mse")(torch.zeros(1, 2), torch.ones(1, 2))
        tensor(1.)
    """
    if temperature is not None:
        check_positive("temperature", temperature)
    tempered = distance in ("kl", "infonce")
    if temperature is not None and not tempered:
        raise ValueError(f"temperature={temperature!r} applies to distance 'kl' and 'infonce' only, not {distance!r}")
    if tempered:
        chosen = DEFAULT_TEMPERATURE[str(distance)] if temperature is None else float(temperature)
        return partial(kl if distance == "kl" else infonce, temperature=chosen)
    if distance in ("mse", "l1"):
        return mse if distance == "mse" else l1
    if isinstance(distance, str):
        raise ValueError(f"distance={distance!r} is unknown; choose one of {', '.join(DISTANCES)}, or pass a callable")
    if not callable(distance):
        raise TypeError(f"distance must be a name or a callable (z, c) -> scalar, got {type(distance).__name__}")
    return distance


def depends_on_class_dim(distance: Distance) -> bool:
    """Whether the value changes if another dimension of the logits is taken for the classes.

    Args:
        distance: (z, c) -> scalar; of one that is none of this module's the answer is yes.

    Examples:
        >>> [depends_on_class_dim(resolve_distance(name)) for name in ("mse", "l1", "kl", "infonce")]
        [False, False, True, True]
    """
    return distance not in (mse, l1)


def value_and_gradient(distance: Distance, z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    r"""Evaluate :math:`\Delta(z, c)` and :math:`\partial\Delta/\partial z`, with c held constant.

    Half-precision logits are lifted to float32 first and autocast is off, so the penalty neither under- nor
    overflows where the model's own arithmetic would.

    Args:
        distance: (z, c) -> scalar.
        z: logits, rows (N, K); no graph of the caller's is used or kept.
        c: forecast, same shape.

    Returns:
        The value, a scalar, 0 of no rows, and the gradient, (N, K); float32 or wider, both without a graph.

    Raises:
        ValueError: the distance does not return a scalar.

    Examples:
        >>> value_and_gradient(mse, torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]]))
        (tensor(2.5000), tensor([[1., 2.]]))
    """
    z, c = _wide(z), _wide(c)
    if not len(z):  # whose mean is no number
        return z.new_zeros(()), torch.zeros_like(z)
    if distance is mse:  # whose gradient is known: autograd costs ten times as much
        return squared(difference(z, c), z.numel())
    leaf = z.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        value = distance(leaf, c)
        if value.ndim != 0:
            raise ValueError(f"distance must return a scalar, got shape {tuple(value.shape)}; reduce it, e.g. .mean()")
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient.contiguous()


def _wide(rows: Tensor) -> Tensor:
    """Rows without a graph, in float32 or wider; each operation that can be left out is felt in a small step."""
    if rows.requires_grad:
        rows = rows.detach()
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.to(torch.float32)


def squared(differences: Tensor, terms: float | Tensor) -> tuple[Tensor, Tensor]:
    r"""Value and gradient of :func:`mse` from the difference :math:`d = z - c`: :math:`d\cdot d/m` and :math:`2d/m`.

    Args:
        differences: (N, K), without a graph.
        terms: m, what the sum of squares is divided by.

    Examples:
        >>> squared(torch.tensor([[1.0, 2.0]]), terms=2)
        (tensor(2.5000), tensor([[1., 2.]]))
    """
    flat = differences.flatten()
    return flat.dot(flat) / terms, differences * (2.0 / terms)


def companion_target(z: Tensor, c: Tensor, alpha: float) -> Tensor:
    r"""The logits that the companion learns, :math:`\alpha c + (1-\alpha) z` (Equation 4, Algorithm 1 line 7).

    Exactly c where the two agree: under l1 the sign of a rounding error would otherwise be the whole gradient.

    Args:
        z: the model's logits, any shape.
        c: the companion's logits, same shape.
        alpha: the share of the past, in [0, 1].

    Examples:
        >>> companion_target(torch.tensor([8.0]), torch.tensor([0.0]), alpha=0.75)
        tensor([2.])
    """
    z, c = _wide(z), _wide(c)
    return torch.where(z == c, c, torch.lerp(c, z, 1.0 - alpha))


def companion_gradient(distance: Distance, z: Tensor, c: Tensor, alpha: float) -> Tensor:
    r"""The gradient of :math:`\Delta(c, \alpha\,\text{stop}(c) + (1-\alpha)\,\text{stop}(z))` with respect to c.

    Args:
        distance: (z, c) -> scalar.
        z: the model's logits, rows (N, K).
        c: the companion's logits, same shape.
        alpha: the share of the past, in [0, 1].

    Returns:
        (N, K), float32 or wider, without a graph.

    Examples:
        >>> companion_gradient(resolve_distance("mse"), torch.tensor([[8.0]]), torch.tensor([[0.0]]), alpha=0.75)
        tensor([[-4.]])
    """
    if distance is mse and len(c):  # in one piece: the target is 1 - α of the way from c to z
        return difference(_wide(c), _wide(z)) * (2.0 * (1.0 - alpha) / c.numel())
    return value_and_gradient(distance, c, companion_target(z, c, alpha))[1]
