"""The other distances of the paper's Table 6, as functions to pass as ``distance=``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim import distances
from dcl_optim.layout import difference


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
    z = z.masked_fill((z == -torch.inf) | (c == -torch.inf), 0.0)
    c = c.masked_fill(c == -torch.inf, 0.0)
    similarity = F.normalize(z, dim=1) @ F.normalize(c, dim=1).T / temperature
    is_another = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = similarity.masked_fill(is_another & (c == 0).all(1), -torch.inf)
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device), reduction="none")


def register() -> None:
    """Let their names be passed, as ``distance="l1"``."""
    for function in (l1, kl, infonce):
        setattr(distances, function.__name__, function)
        distances.DISTANCES[function.__name__] = function
