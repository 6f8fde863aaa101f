"""DCLOptimizer: Deep Companion Learning around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.companion import Companion
from dcl_optim.companion.network import CompanionOptions
from dcl_optim.companion.optimizer import MakeOptimizer
from dcl_optim.optimizer import ForecastOptimizer
from dcl_optim.penalty.distances import Distance, DistanceName, resolve_distance
from dcl_optim.penalty.pull import nothing
from dcl_optim.penalty.weights import Schedule
from dcl_optim.pytorch.arguments import check_positive
from dcl_optim.pytorch.internals import outside_compiled_graphs


class DCLOptimizer(ForecastOptimizer):
    r"""Train a model with Deep Companion Learning by wrapping its optimizer.

    For a batch with logits :math:`z = f(\theta_t, x)` and companion logits :math:`c = f(\omega_t, x)`,

    .. math:: g_\theta = \nabla_\theta\,[\ell(z, y) + \lambda\,\Delta(z, \text{stop}(c))]

    .. math:: g_\omega = \nabla_\omega\,\Delta(c, \alpha\,\text{stop}(c) + (1-\alpha)\,\text{stop}(z))

    The base optimizer steps the model with :math:`g_\theta`, and the companion's optimizer the companion with
    :math:`g_\omega` (Algorithm 1, Equations 2 and 4). The companion is a copy of the model, made at its first training
    forward pass or by :attr:`companion`. It gets the same input in the same mode with the same random draws, and leaves
    the RNG state unchanged. It is copied again when the base optimizer trains other parameters than before.

    **With** ``companion_fraction=f`` the companion gets m = ⌈f n⌉ rows of a batch of n, at least 2, drawn anew for each
    batch, micro-batch and rank, and takes that share of its time. :math:`\Delta` is then the mean over these m rows,
    for the model and for the companion: over all draws it is the mean over the n rows, so :math:`\lambda`,
    :math:`\alpha` and learning rates stay as they are. The other rows have no penalty. Batch norm in the companion
    takes the statistics of its m rows, and its dropout masks are its own; those of the model are repeated with f = 1
    only. Draws depend on the number of the step: the script's generators are not used. A row is an index of dimension
    0 of the logits and of the tensors that the model is called with. The first batch tries whether the companion's
    logits of a part are those of the whole batch, in evaluation mode. Where they are not, it gets all rows, with a
    warning if the fraction was given.

    **What the loss is multiplied by** (a gradient scaler, accumulation) is read from the gradient of a softmax
    cross-entropy. For every other loss add the penalty to it: ``loss = criterion(z, y) + optimizer.penalty(z)``.

    Most scripts need no keyword argument. Those after ``process_group`` are the paper's, and ``strict``. The attribute
    ``base`` is the wrapped optimizer.

    Args:
        base_optimizer: the ``torch.optim`` optimizer to wrap.
        model: the model that it trains.
        weight: :math:`\lambda \ge 0`, or a callable of the step (counted from 1). Default 0.1. The paper uses 1.
        logits: function of the model's output that returns the logits tensor. None (default) for the output itself,
            ``output.logits``, ``output["logits"]``, ``output["out"]`` or the first tensor with classes in a tuple.
        process_group: the ``torch.distributed.ProcessGroup`` over which the companion's gradients are averaged;
            ``"auto"`` (default) for that of DistributedDataParallel, or of fully_shard's mesh; None for none. Where the
            ranks of one model are neither, as where the script averages gradients, pass
            ``torch.distributed.group.WORLD``.
        companion: None (default) for a copy of the model, which shares the parameters that the base optimizer does not
            train; or a module with the same output shape, which stays on its device and in its dtype. In half
            precision it has weights of float32 behind its parameters.
        companion_optimizer: None (default) for a second optimizer of the base's class, whose options follow the base;
            or a callable that builds one from the companion's weights, whose options you schedule.
        companion_lr_scale: the companion's learning rate divided by the base's, > 0. Default 1, and 1 with
            ``companion_optimizer``.
        companion_fraction: the share of the rows (samples) of each batch that the companion gets, in (0, 1], see above.
            None (default) for 0.5, or for all rows, without a warning, where the companion cannot get a part of them.
            With 1 it gets all rows, with the dropout masks of the model: to predict with a companion that an optimizer
            such as Adam trains, pass that.
        alpha: :math:`\alpha \in [0, 1]`, or a callable of the step. Default 0.99. The paper's value is 0.6. With mse,
            1 - alpha multiplies the companion's gradient, which Adam and similar optimizers divide out:
            ``companion_lr_scale`` scales its steps there.
        distance: :math:`\Delta`: ``"mse"`` (default; linear for distant rows), ``"squared"`` (the paper's), ``"l1"``,
            ``"kl"``, ``"infonce"``, or a function (z, c) of rows (N, K) that returns one value a row, (N,).
        strict: raise if a step finds gradients without a training forward pass, and if the weights were changed twice
            without a step. Default True.

    Raises:
        ValueError, TypeError: an argument is invalid, or the base optimizer does not train the model.
        RuntimeError: the model cannot be copied, or its copy would train the model's own parameters (at the first
            training forward pass); the factor on the loss of the first batches cannot be read, or of most in
            the first 100 steps (in backward).

    Warns:
        UserWarning: the copy's first prediction differs from the model's logits; the companion cannot get a part of the
            rows; a later batch cannot be read or is not finite, and gets no penalty; the companion was copied again;
            weights were loaded; or the model returned several tensors that may be the logits.

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

    The paper's settings: ``DCLOptimizer(optimizer, model, weight=1, alpha=0.6, distance="squared",
    companion_fraction=1)``.

    Source: R. Zhu and V. Saligrama, Deep Companion Learning, ECCV 2024. Where we differ: the weight, alpha, and a
    distance that is linear for distant rows. ``companion`` is for its Table 9, ``companion_fraction`` for its Table 10.
    """

    _name = "DCLOptimizer"
    forecaster: Companion

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        *,
        weight: float | Schedule = 0.1,
        logits: Callable[[Any], Tensor] | None = None,
        process_group: Any = "auto",
        companion: nn.Module | None = None,
        companion_optimizer: MakeOptimizer | None = None,
        companion_lr_scale: float = 1.0,
        companion_fraction: float | None = None,
        alpha: float | Schedule = 0.99,
        distance: DistanceName | Distance = "mse",
        strict: bool = True,
    ) -> None:
        check_positive("companion_lr_scale", companion_lr_scale)
        if companion_optimizer is not None and companion_lr_scale != 1:
            raise ValueError(
                f"companion_lr_scale={companion_lr_scale!r} has no effect with companion_optimizer; "
                "set the learning rate of the optimizer that it builds"
            )
        if companion_fraction is not None:
            check_positive("companion_fraction", companion_fraction)
            if companion_fraction > 1:
                raise ValueError(f"companion_fraction={companion_fraction!r} must be in (0, 1]")
        options = CompanionOptions(
            companion=companion,
            make_optimizer=companion_optimizer,
            lr_scale=companion_lr_scale,
            fraction=companion_fraction,
            process_group=process_group,
        )
        super().__init__(
            base_optimizer,
            model,
            lambda: Companion(model, base_optimizer, resolve_distance(distance), logits, options),
            weight=weight,
            alpha=alpha,
            logits=logits,
            strict=strict,
        )

    @outside_compiled_graphs
    def penalty(self, logits: Tensor, labels: Any = None, *, ignore_index: int = -100) -> Tensor:
        r"""The weighted penalty :math:`\lambda\,\Delta(z, c)`, a term to add to any loss as returned.

        The weight :math:`\lambda` is in it: to multiply it by another factor than the loss is to change the weight.

        Autograd carries every factor of the loss. After its first call the hooks add nothing for the rest of the run:
        a step without a term has no penalty, and is counted in ``skipped``. The companion learns in its backward pass,
        whatever factor the term has: the forward passes of a step weigh by the size of their factors, and equally if
        all are 0. With gradients off it is 0 and nothing is learned.

        Args:
            logits: z, what the model's training forward pass returned, or the tensor that ``logits=`` made of it. The
                rows of the distance lie along dimension 1, as in ``F.cross_entropy``, or along the dimension of the
                classes that an earlier cross-entropy showed.
            labels, ignore_index: what DCPOptimizer's penalty takes, so that a script which compares both needs no
                branch. DCL does not use them: it pulls rows without a label too.

        Returns:
            A scalar in float32 or wider, differentiable once with respect to the logits.

        Raises:
            TypeError, ValueError: the logits are no floating-point tensor, or no training forward pass since the last
                step returned them.
            RuntimeError: another optimizer has wrapped the model since, or ``detach`` was called; or in backward, with
                create_graph=True or after the step.

        Examples:
            >>> import torch
            >>> model = torch.nn.Linear(4, 3)
            >>> optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> z = model(torch.randn(16, 4))
            >>> loss = torch.nn.functional.mse_loss(z, torch.randn(16, 3)) + optimizer.penalty(z)
            >>> loss.backward()
            >>> optimizer.step()

        Source: Equation 2.
        """
        if not self._is_for_training(logits):
            return nothing(logits)
        return self._algorithm.term(logits, self._algorithm.progress.forward_of(logits), None)

    @property
    def companion(self) -> nn.Module:
        r"""The companion :math:`\omega`, a module; made now if not before.

        Evaluate it after ``optimizer.companion.eval()``; it takes the model's mode in the next training forward pass.
        It is not compiled with the model: call ``optimizer.companion.compile()``. Write to it by ``load_state_dict`` or
        in ``torch.no_grad()``: in half precision, writes to ``.data`` in place are lost at the next step.
        """
        return self.forecaster.network.module

    def reset_companion(self) -> None:
        """Copy the model again at its next training forward pass, as after loading weights in the middle of a run.

        The companion's optimizer starts again too. RuntimeError: the companion was given as a module.
        """
        self.forecaster.reset()
        self._algorithm.guards.state_loaded()

    @property
    def companion_optimizer(self) -> Optimizer:
        """The companion's optimizer. For parameters in half precision it steps others, of float32."""
        return self.forecaster.network.optimizer
