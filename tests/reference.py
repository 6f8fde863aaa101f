"""The method written out literally, next to the paper's Algorithm 1 and its appendix: what the tests compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Function = Callable[[Tensor, Tensor], Tensor]
UNSEEN = -torch.inf  # an entry of a prototype that no row has shown


def dcl_step(
    model: nn.Module,
    companion: nn.Module,
    optimizer: Optimizer,
    companion_optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
    loss_function: Function,
    distance: Function,
    *,
    weight: float = 1.0,
    alpha: float = 0.99,
    learns: bool = True,
    rows: Tensor | None = None,
) -> Tensor:
    r"""One pass of the loop of Algorithm 1 (lines 5 to 7).

    Args:
        model, companion: :math:`\theta_t` and :math:`\omega_t`, updated in place; the companion starts as a copy.
        optimizer, companion_optimizer: those of the two networks.
        x, y: inputs (batch, ...) and labels.
        loss_function, distance: :math:`\ell`, (z, y) -> scalar, and :math:`\Delta`, (z, c) -> one value a row, of
            which the mean is taken.
        weight, alpha: :math:`\lambda` and :math:`\alpha`.
        learns: whether the companion learns in this pass; the paper's always does.
        rows: the numbers of the rows that the companion learns from (Table 10); None for all.

    Returns:
        The task loss :math:`\ell(z, y)`, detached.

    Examples:
        >>> import copy
        >>> import torch.nn.functional as F
        >>> from dcl_optim.distances import squared
        >>> model = nn.Linear(4, 3)
        >>> companion = copy.deepcopy(model)
        >>> optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, companion)]
        >>> x, y = torch.randn(8, 4), torch.arange(8) % 3
        >>> dcl_step(model, companion, *optimizers, x, y, F.cross_entropy, squared).shape
        torch.Size([])
    """
    before = torch.get_rng_state()
    z = model(x)
    after = torch.get_rng_state()
    torch.set_rng_state(before)  # the companion meets the same dropout masks as the model
    c = companion(x)
    torch.set_rng_state(after)

    loss = loss_function(z, y)
    optimizer.zero_grad()
    (loss + weight * distance(z, c.detach()).mean()).backward()
    optimizer.step()

    # Equation 4's alpha c + (1 - alpha) z, in the form that is exactly c where the two agree: under l1 the sign of a
    # rounding error would otherwise be the whole gradient.
    target = c.detach() + (1 - alpha) * (z.detach() - c.detach())
    if learns:
        companion_optimizer.zero_grad()
        distances = distance(c, target)
        (distances if rows is None else distances[rows]).mean().backward()
        companion_optimizer.step()
    return loss.detach()


def dcp_step(
    model: nn.Module,
    prototypes: dict[int, Tensor],
    optimizer: Optimizer,
    x: Tensor,
    y: Tensor,
    loss_function: Function,
    distance: Function,
    *,
    weight: float = 1.0,
    alpha: float = 0.6,
    numbers: dict[int, float] | None = None,
) -> Tensor:
    r"""One step of Deep Companion Prototype (the appendix, Equations 5 and 6).

    A logit of at most -10,000 is masked: it neither pulls nor is learned from. An entry of a prototype that no row has
    shown does not pull, and its first mean is taken whole.

    Args:
        model: :math:`\theta_t`, updated in place.
        prototypes: the prototype of each class seen so far, (K,) each; updated in place. Minus infinity in entries
            that no row has shown.
        optimizer: that of the model.
        x, y: inputs (batch, ...) and class indices (batch,).
        loss_function, distance: :math:`\ell`, (z, y) -> scalar, and :math:`\Delta`, (z, p) -> one value a row, of
            which the mean is taken.
        weight, alpha: :math:`\lambda` and :math:`\alpha`.
        numbers: :math:`n_k` of each class seen so far, updated in place, if every row is to count alike; None for
            Equation 6.

    Returns:
        The task loss, detached.

    Examples:
        >>> import torch.nn.functional as F
        >>> from dcl_optim.distances import squared
        >>> model, prototypes = nn.Linear(4, 3), {}
        >>> x, y = torch.randn(8, 4), torch.arange(8) % 2
        >>> loss = dcp_step(
        ...     model, prototypes, torch.optim.SGD(model.parameters(), lr=0.1), x, y, F.cross_entropy, squared
        ... )
        >>> sorted(prototypes)
        [0, 1]
    """
    z, labels = model(x), y.tolist()
    rows = z.masked_fill(z <= -1e4, -torch.inf)
    known = [i for i in range(len(y)) if labels[i] in prototypes]
    forecast = {i: prototypes[labels[i]] for i in known}
    penalty = z.sum() * 0.0
    if known:
        penalty = distance(rows[known], torch.stack([forecast[i] for i in known])).sum() / len(y)

    loss = loss_function(z, y)
    optimizer.zero_grad()
    (loss + weight * penalty).backward()
    optimizer.step()

    for k in sorted(set(labels)):
        mine = rows.detach()[y == k]
        shown = mine.isfinite()
        before = prototypes.get(k, torch.full_like(mine[0], UNSEEN))
        if numbers is not None:
            numbers[k] = alpha * numbers.get(k, 0.0) + len(mine)
            share = 1 / numbers[k]
        else:
            share = (1 - alpha) / len(mine)
        moved = before + share * torch.where(shown, mine - before, 0.0).sum(0)
        first = torch.where(shown, mine, 0.0).sum(0) / shown.sum(0)
        first = torch.where(shown.any(0), first, UNSEEN)
        prototypes[k] = torch.where(before == UNSEEN, first, moved)
    return loss.detach()
