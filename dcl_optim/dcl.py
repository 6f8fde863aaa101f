"""DCLOptimizer: Deep Companion Learning around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._validation import check_integer, check_positive
from dcl_optim.companion import Companion
from dcl_optim.companion.optimizer import CompanionOptions, MakeOptimizer
from dcl_optim.distances import Distance, DistanceName, Function, resolve_distance
from dcl_optim.loss.outputs import LogitsFinder
from dcl_optim.loss.reader import LossReader
from dcl_optim.optimizer import ForecastOptimizer
from dcl_optim.schedules import Schedule


class DCLOptimizer(ForecastOptimizer):
    r"""Train a model with Deep Companion Learning by wrapping its optimizer.

    For a batch with logits :math:`z = f(\theta_t, x)` and companion logits :math:`c = f(\omega_t, x)`,

    .. math:: \theta_{t+1} = \text{base step with } \nabla_\theta\,[\ell(z, y) + \lambda\,\Delta(z, \text{stop}(c))]

    .. math::
        \omega_{t+1} = \text{companion step with }
        \nabla_\omega\,\Delta(c, \alpha\,\text{stop}(c) + (1-\alpha)\,\text{stop}(z))

    (Algorithm 1, Equations 2 and 4). The companion is a copy of the model, made at its first training forward pass or
    by :attr:`companion`. It sees the same input in the same mode with the same random draws, and leaves the RNG state
    unchanged.

    Args:
        base_optimizer, model: the optimizer to wrap, and the model that it trains.
        weight: :math:`\lambda \ge 0`, or a callable of the step (counted from 1). Default 0.1. The paper uses 1.
        alpha: :math:`\alpha \in [0, 1]`, or a callable of the step. Default 0.6, the paper's. With mse it scales the
            companion's gradient, which Adam and similar optimizers divide out: use ``companion_lr_scale`` there.
        distance: :math:`\Delta`: ``"mse"`` (default), ``"l1"``, ``"kl"``, ``"infonce"``, or a callable (z, c) ->
            scalar that gets rows of shape (N, K), classes last.
        temperature: for kl (default 4) and infonce (default 0.1), > 0.
        companion: None for a copy of the model, which shares its frozen parameters; a module with the same output
            shape, which stays on its device and in its dtype; or a callable that builds one.
        companion_optimizer: None for a second optimizer of the base's class, whose hyper-parameters follow the base; an
            optimizer over the given companion's parameters, which you schedule; or a callable of parameters.
        companion_lr_scale: the companion's learning rate divided by the base's, > 0. Default 1.
        companion_every: the companion learns once in this many steps, at least 1 (default), and predicts in every step.
        process_group: the ``torch.distributed.ProcessGroup`` over which the companion's gradients are averaged;
            ``"auto"`` (default) for that of DistributedDataParallel, or all ranks with FSDP2; None for none.
        loss_scale: what the loss is multiplied by before backward: ``"auto"`` (default; see
            :mod:`dcl_optim.loss.reader`), a number, a ``torch.amp.GradScaler``, or a callable without arguments.
        logits: function of the model's output that returns the logits tensor; None looks for them as
            :func:`~dcl_optim.loss.outputs.find_logits` says.
        class_dim: the dimension of the logits that holds the classes: 1 as in ``F.cross_entropy``, -1 for (batch, time,
            classes). None (default) finds it in the gradient, or takes 1.
        strict: raise if a step finds gradients without a training forward pass, and in the second step of the base
            optimizer alone. Default True.
        count_eval: regularize forward passes in eval mode too. Default False.

    Raises:
        ValueError, TypeError: an argument is invalid, or the base optimizer does not train the model.
        RuntimeError: the model cannot be copied (mostly at its first training forward pass).

    Warns:
        UserWarning: loss scale or class dimension cannot be read where they matter, or a batch is not finite.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> optimizer.companion(x).shape
        torch.Size([16, 3])

    Source: R. Zhu and V. Saligrama, Deep Companion Learning, ECCV 2024.
    """

    _name = "DCLOptimizer"
    _elsewhere: ClassVar[dict[str, str]] = {
        "prototypes": "DCPOptimizer has prototypes, DCLOptimizer has a companion; use optimizer.companion",
        "set_targets": "DCPOptimizer has it; DCLOptimizer needs no labels",
    }
    forecaster: Companion

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        *,
        weight: float | Schedule = 0.1,
        alpha: float | Schedule = 0.6,
        distance: DistanceName | Distance | Function = "mse",
        temperature: float | None = None,
        companion: nn.Module | Callable[[], nn.Module] | None = None,
        companion_optimizer: Optimizer | MakeOptimizer | None = None,
        companion_lr_scale: float = 1.0,
        companion_every: int = 1,
        process_group: Any = "auto",
        loss_scale: Any = "auto",
        logits: Callable[[Any], Tensor] | None = None,
        class_dim: int | None = None,
        strict: bool = True,
        count_eval: bool = False,
    ) -> None:
        check_positive("companion_lr_scale", companion_lr_scale)
        options = CompanionOptions(
            companion,
            companion_optimizer,
            companion_lr_scale,
            check_integer("companion_every", companion_every, minimum=1),
            process_group,
        )
        chosen = resolve_distance(distance, temperature)
        super().__init__(
            base_optimizer,
            model,
            lambda: Companion(model, base_optimizer, LogitsFinder(logits), options),
            chosen,
            weight=weight,
            alpha=alpha,
            loss=LossReader(loss_scale, class_dim=class_dim, needs_class_dim=chosen.depends_on_class_dim),
            logits=logits,
            strict=strict,
            count_eval=count_eval,
        )

    def penalty(self, logits: Tensor) -> Tensor:
        r"""The weighted penalty :math:`\lambda\,\Delta(z, c)` as a term of the loss, for any loss.

        Args:
            logits: what the model's training forward pass returned, of any shape.

        Examples:
            >>> import torch
            >>> model = torch.nn.Linear(4, 3)
            >>> optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> z = model(torch.randn(16, 4))
            >>> loss = torch.nn.functional.mse_loss(z, torch.randn(16, 3)) + optimizer.penalty(z)
            >>> loss.backward()
            >>> optimizer.step()
        """
        return self._algorithm.penalty(logits, None)

    @property
    def companion(self) -> nn.Module:
        r"""The companion :math:`\omega`, a module; made now if not before.

        Evaluate it after ``optimizer.companion.eval()``; it takes the model's mode in the next training forward pass.
        """
        return self.forecaster.module

    def reset_companion(self) -> None:
        """Copy the model again at its next training forward pass, as after loading weights in the middle of a run.

        The companion's optimizer starts again too. RuntimeError: the companion was given as a module.
        """
        self.forecaster.reset()

    @property
    def companion_optimizer(self) -> Optimizer:
        """The companion's optimizer."""
        return self.forecaster.optimizer
