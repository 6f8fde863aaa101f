"""The method written out literally, next to the paper's Algorithm 1 and its appendix: what the tests compare with.

First its formulas and one step of each method; then both methods for any training step, by the factor that autograd has
for each term; last the loops that train these and the optimizers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from tests.helpers import assert_same, mlp, sgd, whole

Function = Callable[[Tensor, Tensor], Tensor]
DISTANCES = {name: getattr(distances, name) for name in ("mse", "squared", "l1", "kl", "infonce")}


# ---- the formulas ----------------------------------------------------------------------------------------------------


def companions_target(z: Tensor, c: Tensor, alpha: float) -> Tensor:
    r"""Equation 4: :math:`\alpha c + (1 - \alpha) z`.

    In the form that is exactly c where the two agree: under l1 the sign of a rounding error would otherwise be the
    whole gradient.
    """
    return c.detach() + (1 - alpha) * (z.detach() - c.detach())


def prototypes_penalty(z: Tensor, shares: Tensor, prototypes: dict[int, Tensor], distance: Function) -> Tensor:
    """Equation 5: the mean distance of the rows from what the prototypes forecast for their labels.

    Args:
        z: logits (batch, K).
        shares: of each class in the label of each row (batch, K).
        prototypes: the prototype of each class seen so far, (K,) each. A row with a share of another class counts as 0.
        distance: (z, p) -> one value a row.
    """
    known = [row for row, of in enumerate(shares) if all(k in prototypes for k in of.nonzero()[:, 0].tolist())]
    if not known:
        return (z * 0.0).nan_to_num(0.0).sum()
    forecasts = [sum(shares[row, k] * prototypes[k] for k in shares[row].nonzero()[:, 0].tolist()) for row in known]
    return distance(z[known], torch.stack(forecasts)).sum() / len(z)


def prototypes_learn(
    z: Tensor, shares: Tensor, prototypes: dict[int, Tensor], alpha: float, numbers: dict[int, float] | None
) -> None:
    """Equation 6, or with ``numbers`` the mean of all rows, older ones times alpha a step; both are updated in place.

    Args:
        z: logits (batch, K); minus infinity where they are masked.
        shares: of each class in the label of each row (batch, K).
        prototypes: the prototype of each class seen so far, (K,) each; an entry that no row has shown is 0.
        alpha: what a step leaves of the weight of older rows.
        numbers: the sum of shares of each class seen so far.
    """
    for k in (shares > 0).any(0).nonzero()[:, 0].tolist():
        mine = shares[:, k] > 0
        rows, weights = z[mine], shares[mine, k][:, None]
        before = prototypes.get(k, torch.zeros_like(z[0]))
        if numbers is not None:
            numbers[k] = alpha * numbers.get(k, 0.0) + weights.sum().item()
            step = 1 / numbers[k]
        else:
            step = (1 - alpha if k in prototypes else 1) / weights.sum()
        prototypes[k] = before + step * torch.where(rows.isfinite(), weights * (rows - before), 0.0).sum(0)


# ---- a step ----------------------------------------------------------------------------------------------------------


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
        rows: the numbers of the rows that the companion gets (Table 10), which alone are pulled; None for all.

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
    torch.set_rng_state(before)  # of all rows the companion meets the same dropout masks as the model
    c = companion(x if rows is None else x[rows])
    torch.set_rng_state(after)
    seen = z if rows is None else z[rows]

    loss = loss_function(z, y)
    optimizer.zero_grad()
    (loss + weight * distance(seen, c.detach()).mean()).backward()
    optimizer.step()

    companion_optimizer.zero_grad()
    distance(c, companions_target(seen, c, alpha)).mean().backward()
    step_once_there_is_a_gradient(companion_optimizer)
    return loss.detach()


def step_once_there_is_a_gradient(optimizer: Optimizer) -> None:
    """Step the companion's optimizer, but not before a gradient that is not 0: a copy of the model begins with 0."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    has_begun = getattr(optimizer, "has_begun", False) or any(bool((gradient != 0).any()) for gradient in gradients)
    optimizer._opt_called = True  # else a scheduler of it warns that it comes before a step
    if has_begun:
        optimizer.has_begun = True
        optimizer.step()


class DrawnRows:
    """The numbers of the rows that the companion gets of each batch; None for all."""

    def __init__(self, fraction: float) -> None:
        self._fraction, self._step = fraction, 1
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, length: int) -> Tensor | None:
        number = max(math.ceil(self._fraction * length), 2)
        if number >= length:
            return None
        return torch.randperm(length, generator=self._generator)[:number]

    def end_step(self) -> None:
        self._step += 1
        self._generator = torch.Generator().manual_seed(self._step)


class Rounded(nn.Module):
    """A network that computes in half precision, with the rounding of weights that are float32.

    As DCL's companion does whose model is in half precision. The gradient of a weight is that of its rounding.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self.dtype = dtype
        for parameter in network.parameters():
            parameter.data = parameter.data.float()

    def forward(self, x: Tensor) -> Tensor:
        rounded = {name: parameter.to(self.dtype) for name, parameter in self.network.named_parameters()}
        logits: Tensor = torch.func.functional_call(self.network, rounded, (x.to(self.dtype),))
        return logits


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

    A logit of at most -10,000 is masked: it neither pulls nor is learned from. An entry of a prototype begins at 0.

    Args:
        model: :math:`\theta_t`, updated in place.
        prototypes: the prototype of each class seen so far, (K,) each; updated in place.
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
    z = model(x)
    rows, shares = z.masked_fill(z <= -1e4, -torch.inf), F.one_hot(y, z.shape[1]).to(z)
    penalty = prototypes_penalty(rows, shares, prototypes, distance)

    loss = loss_function(z, y)
    optimizer.zero_grad()
    (loss + weight * penalty).backward()
    optimizer.step()

    prototypes_learn(rows.detach(), shares, prototypes, alpha, numbers)
    return loss.detach()


def train_by_hand(
    model: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    data: Iterable[tuple[Tensor, Tensor]],
    companion: nn.Module | None = None,
    distance: Function = distances.mse,
    **settings: float,
) -> tuple[nn.Module, nn.Module]:
    """Train by :func:`dcl_step`; ``make`` gives each network its optimizer."""
    companion = copy.deepcopy(model) if companion is None else companion
    base, second = make(model), make(companion)
    for x, y in data:
        dcl_step(model, companion, base, second, x, y, F.cross_entropy, distance, **settings)
    return model, companion


# ---- any training step -----------------------------------------------------------------------------------------------

VARIANTS = ("dcl", "dcp")
EACH = pytest.mark.parametrize("variant", VARIANTS)
EACH_WAY = pytest.mark.parametrize("way", ["line", "term"])
GOES_ON_BY_THE_TERM = pytest.mark.filterwarnings("ignore:.*penalty is called for the first time")  # after the line
WEIGHT, ALPHA = 0.7, 0.4
METHOD = {"weight": WEIGHT, "alpha": ALPHA, "distance": "squared"}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
NEAR = {"rtol": 1e-9, "atol": 1e-10}  # where the errors of many steps add up


class _Hand:
    """A step of the base optimizer, then one of the method, with the factor that autograd has for each term.

    In ``step(closure)`` the first evaluation is learned from; one that came before the step is the first.
    """

    def __init__(self, model: nn.Module, base: Optimizer | None = None) -> None:
        self.model, self.base = model, base or sgd(model)
        self.kept: list[tuple[Tensor, Any]] = []
        self._learns = True

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def term(self, distance: Tensor, lesson: Any) -> Tensor:
        term = WEIGHT * distance
        if self._learns:
            term.register_hook(lambda factor: self.kept.append((factor, lesson)))
        return term

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        def evaluate() -> Any:
            loss = closure()
            self._learns = False
            return loss

        self._learns = not self.kept
        self.base.step(*([] if closure is None else [evaluate]))
        self.learn()
        self.kept, self._learns = [], True

    def learn(self) -> None:
        raise NotImplementedError


class HandDCL(_Hand):
    """The companion runs beside the model, with the same random draws; ``find`` gives the logits of an output.

    With a ``fraction`` it gets drawn rows of the tensors that the model is called with, but all of the first batch.
    """

    def __init__(
        self,
        model: Any,
        base: Any = None,
        companion: Any = None,
        find: Any = lambda output: output,
        fraction: float = 1.0,
    ) -> None:
        super().__init__(model, base)
        self._draw = DrawnRows(fraction)
        self.companion, self._find, self._outputs = companion or copy.deepcopy(model), find, []
        self._second = sgd(self.companion)
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        self._draws = torch.get_rng_state()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        after = torch.get_rng_state()
        torch.set_rng_state(self._draws)
        z = self._find(output)
        rows = self._draw(len(z))
        if rows is not None:
            args = tree_map(lambda tensor: tensor[rows], args)
        self._outputs.append((z, z if rows is None else z[rows], self._find(self.companion(*args, **kwargs))))
        torch.set_rng_state(after)

    def penalty(self, z: Tensor) -> Tensor:
        *_, (seen, c) = [(seen, c) for output, seen, c in self._outputs if torch.equal(output, z)]
        return self.term(F.mse_loss(seen, c.detach()), F.mse_loss(c, companions_target(seen, c, ALPHA)))

    def learn(self) -> None:
        self._second.zero_grad()
        (sum(s.abs() * chase for s, chase in self.kept) / sum(s.abs() for s, _ in self.kept)).backward()
        step_once_there_is_a_gradient(self._second)
        self._outputs = []
        self._draw.end_step()


def squared(z: Tensor, p: Tensor) -> Tensor:
    """The mean square of a row's differences, 0 where an entry is masked."""
    return (z - p).nan_to_num(0.0, 0.0, 0.0).square().mean(1)


class HandDCP(_Hand):
    """The prototypes are running means of the rows of each class."""

    def __init__(self, model: nn.Module, base: Optimizer | None = None) -> None:
        super().__init__(model, base)
        self._means: dict[int, Tensor] = {}
        self._numbers: dict[int, float] = {}

    @property
    def prototypes(self) -> Tensor:
        none = torch.zeros_like(next(iter(self._means.values())))
        return torch.stack([self._means.get(k, none) for k in range(len(none))])

    def penalty(self, z: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        rows = z.movedim(1, -1).flatten(0, -2)
        if labels.is_floating_point():
            shares = labels.movedim(1, -1).flatten(0, -2)
        else:
            rows, labels = rows[labels.flatten() != ignore_index], labels[labels != ignore_index]
            shares = F.one_hot(labels, z.shape[1]).to(rows)
        return self.term(prototypes_penalty(rows, shares, self._means, squared), (rows.detach(), shares))

    def learn(self) -> None:
        rows, shares = (torch.cat(parts) for parts in zip(*(lesson for _, lesson in self.kept), strict=True))
        prototypes_learn(rows, shares, self._means, ALPHA, self._numbers)


def by_hand(variant: str, model: nn.Module, base: Optimizer | None = None, **options: Any) -> Any:
    return HandDCL(model, base, **options) if variant == "dcl" else HandDCP(model, base)


def wrap(variant: str, model: nn.Module, base: Optimizer | None = None, **options: Any) -> Any:
    if variant == "dcl":
        return DCLOptimizer(base or sgd(model), model, **(METHOD | {"companion_fraction": 1} | options))
    return DCPOptimizer(base or sgd(model), model, **(METHOD | options))


def term_of(optimizer: Any, way: str = "term") -> Callable[..., Any]:
    """The penalty of logits and labels by either method, 0 by the line.

    DCL gets ``returned``, what the model returned, where DCP gets what the script has made of it.
    """

    def term(z: Tensor, labels: Tensor, returned: Tensor | None = None, **options: Any) -> Any:
        if way == "line":
            return 0.0
        if isinstance(optimizer, (DCPOptimizer, HandDCP)):
            return optimizer.penalty(z, labels, **options)
        return optimizer.penalty(z if returned is None else returned)

    return term


def loss_of(optimizer: Any, x: Tensor, y: Tensor, way: str = "term") -> Tensor:
    """Cross-entropy, with the penalty where the script adds it."""
    z = optimizer.model(x)
    return F.cross_entropy(z, y) + term_of(optimizer, way)(z, y)


# ---- loops, and what they have trained -------------------------------------------------------------------------------


def train(
    optimizer: Any,
    data: Iterable[tuple[Tensor, Tensor]],
    way: str = "term",
    loss: Any = F.multi_margin_loss,
    call: Any = None,
    compiled: Any = lambda function: function,
) -> Any:
    """The plain loop; ``call`` is what the script calls."""
    call = optimizer.model if call is None else call
    term = term_of(optimizer, way)
    criterion = compiled(lambda z, y: loss(z, y) + term(z, y))
    for x, y in data:
        optimizer.zero_grad()
        criterion(call(x), y).backward()
        optimizer.step()
    return optimizer


def train_by_closures(optimizer: Any, data: Any, loss: Any, way: str = "term") -> Any:
    term = term_of(optimizer, way)
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            z = optimizer.model(x)
            found = loss(z, y) + term(z, y)
            optimizer.zero_grad()
            found.backward()
            return found

        optimizer.step(closure)
    return optimizer


def learned(optimizer: Any) -> dict[str, Tensor]:
    """What companion or prototypes have learned."""
    if isinstance(optimizer, (DCPOptimizer, HandDCP)):
        return {"prototypes": optimizer.prototypes}
    return dict(optimizer.companion.state_dict())


def result(optimizer: Any) -> list[dict[str, Tensor]]:
    """What an optimizer has trained, with tensors that are sharded over ranks put together."""
    return [whole(optimizer.model.state_dict()), whole(learned(optimizer))]


def apart(variant: str, make: Any = wrap) -> Any:
    """In float32, with a companion that is not the model: the penalty is large from the start."""
    options = {"companion": mlp(3, dtype=torch.float32)} if variant == "dcl" else {}
    return make(variant, mlp(dtype=torch.float32), **options)


def end(optimizer: Any) -> list[Tensor]:
    states = dict(optimizer.model.state_dict()), learned(optimizer)
    return [torch.cat([tensor.flatten() for tensor in state.values()]) for state in states]


def assert_same_training(first: Any, second: Any, **tolerance: float) -> None:
    """Compare what two optimizers have trained: bit for bit without a tolerance."""
    assert_same(first.model, second.model, **tolerance)
    assert_same(learned(first), learned(second), **tolerance)
