"""DCPOptimizer: Deep Companion Prototype, the variant without a second network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim._validation import check_integer, check_labels
from dcl_optim.distances import Distance, DistanceName, Function, resolve_distance
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.loss.reader import LossReader, Targets
from dcl_optim.optimizer import ForecastOptimizer
from dcl_optim.prototypes import UPDATES, Prototypes
from dcl_optim.schedules import Schedule
from dcl_optim.weights import Weight


class DCPOptimizer(ForecastOptimizer):
    r"""Train a model with Deep Companion Prototype by wrapping its optimizer.

    Each class k has a prototype :math:`p^k \in \mathbb{R}^K` of its logits. The penalty pulls each row towards the
    prototype of its label, and the prototypes then follow the rows of the batch (the paper's appendix, Equations 5 and
    6):

    .. math::
        \theta_{t+1} = \text{base step with }
        \nabla_\theta\,\Big[\ell(z, y) + \frac{\lambda}{N}\sum_i \Delta(z_i, p^{y_i}_t)\Big]

    .. math:: n_k \leftarrow \alpha\,n_k + m_k, \qquad p^k \leftarrow p^k + \tfrac{1}{n_k}\sum_{i:\,y_i=k}(z_i - p^k)

    for the classes of the batch, with :math:`m_k` rows of class k: a running mean of the rows. A class gives no penalty
    before its first mean is its prototype.

    **Labels** are read from the gradient of a softmax cross-entropy (:mod:`dcl_optim.loss.cross_entropy`). For other
    losses pass ``targets=`` or call :meth:`set_targets`; with ``loss_scale=`` the label of a row is its only negative
    entry. Labels are class indices, or distributions of the logits' shape. For sigmoid outputs (binary, multi-label)
    and regression use :class:`~dcl_optim.DCLOptimizer`.

    Args:
        base_optimizer, model: as in :class:`~dcl_optim.DCLOptimizer`.
        num_classes: K, the number of classes and of logits; the prototypes take K² numbers, at most 1 GiB. None
            (default) for that of the first logits.
        weight: :math:`\lambda \ge 0`, a callable of the step, or ``"auto"`` (default), which grows from 0.1 to 1, with
            fewer than 100 classes to K/100, as the training accuracy grows (:class:`~dcl_optim.AutoWeight`).
        alpha: :math:`\alpha \in [0, 1]`, or a callable of the step. Default 0.97. The paper's value is 0.6.
        distance, temperature: as in DCLOptimizer. ``"infonce"`` and callables synchronize a GPU at each step.
        update: ``"rows"`` (default) for the formula above, or ``"batch"`` for Equation 6,
            :math:`p^k \leftarrow \alpha\,p^k + (1-\alpha)\,\mathrm{mean}_k(z)`, which can diverge in long training.
        targets: the model's keyword that holds the labels, or a callable ``(args, kwargs) -> labels``.
        ignore_index: the label to leave out. Default -100, as in torch.
        process_group: as in DCLOptimizer; class sums are added up over its ranks.
        loss_scale, logits, class_dim, strict, count_eval: as in DCLOptimizer.

    Raises:
        ValueError, TypeError, RuntimeError: as in DCLOptimizer; in backward, labels that do not fit (on a GPU not
            checked in each step) or cannot be read.

    Warns:
        UserWarning: the labels of a later batch cannot be read; it gets no penalty.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(4, 3)
        >>> optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> optimizer.zero_grad()
        >>> nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.arange(16) % 3).backward()
        >>> optimizer.step()
        >>> optimizer.prototypes.shape
        torch.Size([3, 3])

    Source: R. Zhu and V. Saligrama, Deep Companion Learning, ECCV 2024, appendix. Where we differ: the weight, alpha,
    prototypes that count rows and not batches, and a distance that is linear far out. The paper's DCP is ``weight=1,
    alpha=0.6, update="batch", distance="squared"``.
    """

    _name = "DCPOptimizer"
    _elsewhere = dict.fromkeys(
        ("companion", "companion_optimizer", "reset_companion"),
        "DCLOptimizer has a companion, DCPOptimizer has prototypes; use optimizer.prototypes",
    )
    _prototypes = Prototypes
    forecaster: Prototypes

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        num_classes: int | None = None,
        *,
        weight: Weight = "auto",
        alpha: float | Schedule = 0.97,
        distance: DistanceName | Distance | Function = "mse",
        update: Literal["rows", "batch"] = "rows",
        temperature: float | None = None,
        targets: Targets | None = None,
        ignore_index: int = -100,
        process_group: Any = "auto",
        loss_scale: Any = "auto",
        logits: Callable[[Any], Tensor] | None = None,
        class_dim: int | None = None,
        strict: bool = True,
        count_eval: bool = False,
    ) -> None:
        classes = None if num_classes is None else check_integer("num_classes", num_classes, minimum=1)
        if update not in UPDATES:
            raise ValueError(f"update={update!r} is unknown; choose one of {', '.join(UPDATES)}")
        ignored = check_integer("ignore_index", ignore_index)
        super().__init__(
            base_optimizer,
            model,
            lambda: self._prototypes(
                classes, ignored, update, next(iter(model.parameters())), DataParallelGroup(model, process_group)
            ),
            resolve_distance(distance, temperature),
            weight=weight,
            alpha=alpha,
            loss=LossReader(loss_scale, targets, reads_labels=True, class_dim=class_dim, needs_class_dim=True),
            logits=logits,
            strict=strict,
            count_eval=count_eval,
        )

    def penalty(self, logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        r"""The weighted penalty :math:`\frac{\lambda}{N}\sum_i\Delta(z_i, p^{y_i})` as a term of the loss.

        Args:
            logits: (N, K) or (N, K, d1, ...), any tensor of logits: the prototypes live in what is given.
            labels: class indices (N,) or (N, d1, ...), or soft labels of the logits' shape.
            ignore_index: the label to leave out. Default -100, as in torch.

        Examples:
            >>> import torch
            >>> model = torch.nn.Linear(4, 3)
            >>> optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> z, y = model(torch.randn(16, 4)), torch.arange(16) % 3
            >>> loss = torch.nn.functional.multi_margin_loss(z, y) + optimizer.penalty(z, y)
            >>> loss.backward()
            >>> optimizer.step()
        """
        if not labels.dtype.is_floating_point and ignore_index != self.forecaster._ignore_index:
            labels = labels.masked_fill(labels == ignore_index, self.forecaster._ignore_index)
        return self._algorithm.penalty(logits, labels)

    @property
    def prototypes(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero for a class not yet seen, (0, 0) before K is known."""
        return self.forecaster.values

    def set_targets(self, targets: Tensor) -> None:
        """Give the labels of the next forward pass of the model; with ``step(closure)`` inside the closure."""
        check_labels(targets)
        self._algorithm.loss.set_targets(targets)
