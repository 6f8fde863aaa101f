"""DCLOptimizer: Deep Companion Learning around any optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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

    one forward and backward pass of each network (Algorithm 1, Equations 2 and 4). The companion is a copy of the
    model, made when its first training forward pass begins (earlier by :attr:`companion` or ``load_state_dict``). It
    has its own batch-norm statistics, sees the same input in the same mode, replays the same random draws (dropout),
    and leaves the RNG state as if it had not run.

    Args:
        base_optimizer, model: the optimizer that the script used so far, and the model that it trains.
        weight: :math:`\lambda \ge 0`, or a callable of the step (counted from 1). Default 0.1. The paper's value is 1,
            which lost to plain training in our measurements.
        alpha: :math:`\alpha \in [0, 1]`, or a callable of the step, for the companion's target. Default 0.6, as in the
            paper. With mse it scales the companion's gradient by :math:`1-\alpha`, which Adam and similar optimizers
            divide out: use ``companion_lr_scale`` there.
        distance: :math:`\Delta`: ``"mse"`` (default), ``"l1"``, ``"kl"``, ``"infonce"``, or a callable (z, c) ->
            scalar that gets rows of shape (N, K), classes last.
        temperature: for kl (default 4) and infonce (default 0.1), > 0.
        companion: None for a copy of the model, which shares its frozen parameters; a module of any architecture with
            the same output shape, on the device where it is; or a callable that builds one, at once.
        companion_optimizer: None for a second optimizer of the base's class that follows the base's hyper-parameters
            at every step; an optimizer over the given companion's parameters, which is not modified; or a callable that
            builds one from parameters.
        companion_lr_scale: the companion's learning rate divided by the base's, > 0. Default 1.
        companion_every: the companion learns once in this many steps, at least 1 (default), and predicts in every step.
        process_group: the ranks over which the companion's gradients are averaged: ``"auto"`` (default) for those of
            DistributedDataParallel around the model, all ranks when FSDP shards it, and none otherwise; a
            ``torch.distributed.ProcessGroup``, for a script that averages the gradients itself; or None for none.
        loss_scale: what the loss is multiplied by before backward: ``"auto"`` (default; see
            :mod:`dcl_optim.loss.reader`), a number, a ``torch.amp.GradScaler``, or a callable without arguments.
        logits: function of the model's output that returns the logits tensor; None looks for them as
            :func:`~dcl_optim.loss.outputs.find_logits` says.
        class_dim: the dimension of the logits that holds the classes: 1 as in ``F.cross_entropy``, -1 for (batch, time,
            classes). None (default) for the one along which the loss's gradient is a softmax cross-entropy's, or else
            1, with a warning if the distance depends on it (kl, infonce, callables).
        strict: raise when a step finds gradients that no training forward pass led to. Default True.
        count_eval: count the model's forward passes in eval mode too, where gradients are on. Default False.

    Raises:
        ValueError, TypeError: an argument out of range or of the wrong type, a base that does not train the model, or
            with ``maximize=True``.
        RuntimeError: the model cannot be copied (mostly at its first training forward pass); in ``step``: see
            ``strict``.

    Warns:
        UserWarning: hooks of the model that the companion does not get; a first prediction that is not the model's;
            several tensors that may be the logits; weights that were loaded in the run; a companion that is not finite.

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

    Source: R. Zhu and V. Saligrama, Deep Companion Learning, ECCV 2024. The reduction, which the paper leaves open, is
    the one its authors ran.
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

    @property
    def companion(self) -> nn.Module:
        r"""The companion :math:`\omega` as a module; evaluate it as any other. Made by this, if not before."""
        return self.forecaster.module

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Give the companion in eval mode inside a ``with`` block, and restore the mode of each module afterwards.

        Examples:
            >>> import torch
            >>> model = torch.nn.Linear(4, 3)
            >>> optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> with torch.no_grad(), optimizer.evaluating() as companion:
            ...     companion(torch.ones(2, 4)).shape
            torch.Size([2, 3])
        """
        companion = self.companion
        modes = {module: module.training for module in companion.modules()}
        companion.eval()
        try:
            yield companion
        finally:
            for module, training in modes.items():
                module.training = training

    def reset_companion(self) -> None:
        """Replace the companion by a new copy of the model, made when its next training forward pass begins.

        Call it after loading weights into the model in the middle of a run. The companion's optimizer starts anew too.

        Raises:
            RuntimeError: ``companion`` was given as a module.
        """
        self.forecaster.reset()

    @property
    def companion_optimizer(self) -> Optimizer:
        """The companion's optimizer."""
        return self.forecaster.optimizer
