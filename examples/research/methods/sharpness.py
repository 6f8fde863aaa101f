"""Methods that look for flat minima by gradients at perturbed weights: SAM and GAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.research.methods.base import Method, Setting, Trained, check_range, frozen_statistics

EPSILON = 1e-12  # keeps the division by a gradient's norm finite


def sharpness_aware(base: Optimizer, rho: float) -> Optimizer:
    r"""Put SAM around an optimizer (Foret et al., ICLR 2021, Algorithm 1), from ``pytorch_optimizer``.

    .. math:: \theta \leftarrow \text{base step with } \nabla \ell(\theta + \rho\, g / \lVert g \rVert),
        \quad g = \nabla \ell(\theta)

    Args:
        base: the optimizer that steps.
        rho: the radius :math:`\rho > 0`; the paper has 0.05 on CIFAR.

    Raises:
        ImportError: ``pytorch_optimizer`` is not installed.
    """
    try:
        from pytorch_optimizer import SAM
    except ImportError as error:
        raise ImportError("SAM needs a package: pip install pytorch_optimizer") from error

    def keep_base(groups: Any, **options: Any) -> Any:
        return base

    return SAM(base.param_groups, cast(Any, keep_base), rho=rho)


class GradientNormAware(Method):
    r"""GAM, Gradient norm Aware Minimization (Zhang et al., CVPR 2023), in its form of four gradients.

    .. math::
        g_0 &= \nabla\ell(\theta), \qquad g_1 = \nabla\ell(\theta + \rho'\, \hat g_0) \\
        g_2 &= \nabla\ell(\theta'), \qquad g_3 = \nabla\ell(\theta' + \rho'\, \hat g_2),
        \qquad \theta' = \theta + \rho\, \widehat{g_1 - g_0} \\
        h &= \beta_1 g_1 + (1 - \beta_1) g_3, \qquad v = \beta_0 g_0 + (1 - \beta_0) g_2 \\
        d &= h - \gamma\, (v - \langle v, \hat h \rangle\, \hat h)

    where a hat divides by the Euclidean norm over all parameters. The base optimizer steps with d. :math:`g_1 - g_0`
    is a finite difference of the gradient norm's gradient, so :math:`\theta'` is where that norm is large nearby;
    :math:`g_3` descends from there, and the last line lowers the loss's own gradient orthogonally, as GSAM does.

    Where this is simpler than the authors' code: both radii are constant (theirs may follow the learning rate), the
    two weights of h and of v add up to 1 (theirs are four numbers), and their v does not weigh :math:`g_0`. The
    three further forwards leave batch norm's statistics alone.

    Args:
        setting: what to train with.
        rho: the radius :math:`\rho \ge 0` of the ascent on the gradient norm. Default 0.2, the authors' for CIFAR-100.
        rho_gradient: the radius :math:`\rho' \ge 0` of the finite differences. Default 0.02.
        beta_0: in [0, 1]. Default 0.5.
        beta_1: in [0, 1]. Default 0.6.
        gamma: :math:`\gamma \ge 0`. Default 0.03.

    Raises:
        ValueError: an option out of range.
    """

    cost = 4.0

    def __init__(
        self,
        setting: Setting,
        *,
        rho: float = 0.2,
        rho_gradient: float = 0.02,
        beta_0: float = 0.5,
        beta_1: float = 0.6,
        gamma: float = 0.03,
    ) -> None:
        for name, value in {"rho": rho, "rho_gradient": rho_gradient, "gamma": gamma}.items():
            check_range(name, value, 0)
        for name, value in {"beta_0": beta_0, "beta_1": beta_1}.items():
            check_range(name, value, 0, 1)
        super().__init__(setting, model=Trained(setting))
        self._rho, self._rho_gradient, self._gamma = rho, rho_gradient, gamma
        self._beta_0, self._beta_1 = beta_0, beta_1

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        network, optimizer = self.main.network, self.main.optimizer
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        start = [parameter.detach().clone() for parameter in parameters]
        loss = self.criterion(network(x), y)
        g_0 = _gradient(loss, parameters)

        def gradient() -> list[Tensor]:
            return _gradient(self.criterion(network(x), y), parameters)

        with frozen_statistics(network):
            _ascend(parameters, g_0, self._rho_gradient)
            g_1 = gradient()
            _move(parameters, start)
            _ascend(parameters, [one - zero for one, zero in zip(g_1, g_0, strict=True)], self._rho)
            g_2 = gradient()
            _ascend(parameters, g_2, self._rho_gradient)
            g_3 = gradient()
            _move(parameters, start)
        for parameter, direction in zip(parameters, self._combine(g_0, g_1, g_2, g_3), strict=True):
            parameter.grad = direction
        optimizer.step()
        return loss.detach()

    def _combine(self, *gradients: list[Tensor]) -> list[Tensor]:
        g_0, g_1, g_2, g_3 = gradients
        h = [torch.lerp(three, one, self._beta_1) for one, three in zip(g_1, g_3, strict=True)]
        v = [torch.lerp(two, zero, self._beta_0) for zero, two in zip(g_0, g_2, strict=True)]
        inner = torch.stack([(a * b).sum() for a, b in zip(v, h, strict=True)]).sum()
        along = inner / (_norm(h) ** 2 + EPSILON)
        return [b - self._gamma * (a - along * b) for a, b in zip(v, h, strict=True)]


def _gradient(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, parameters, materialize_grads=True))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


@torch.no_grad()
def _ascend(parameters: Sequence[nn.Parameter], direction: Sequence[Tensor], radius: float) -> None:
    scale = radius / (_norm(direction) + EPSILON)
    for parameter, part in zip(parameters, direction, strict=True):
        parameter.add_(part * scale)


@torch.no_grad()
def _move(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
