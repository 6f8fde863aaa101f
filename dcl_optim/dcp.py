"""DCPOptimizer: Deep Companion Prototype, the variant without a second network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from dcl_optim.optimizer import ForecastOptimizer
from dcl_optim.penalty.distances import Distance, DistanceName, resolve_distance
from dcl_optim.penalty.pull import nothing
from dcl_optim.penalty.weights import Schedule, Weight
from dcl_optim.progress import Forward
from dcl_optim.prototypes.labels import labels_of
from dcl_optim.prototypes.prototypes import UPDATES, Prototypes
from dcl_optim.pytorch.arguments import check_integer
from dcl_optim.pytorch.internals import outside_compiled_graphs
from dcl_optim.pytorch.ranks import DataParallelGroup


class DCPOptimizer(ForecastOptimizer):
    r"""Train a model with Deep Companion Prototype by wrapping its optimizer.

    Each class k has a prototype :math:`p^k \in \mathbb{R}^K` of its logits. The penalty pulls each row toward the
    prototype of its label. The base optimizer steps with the gradient

    .. math:: g = \nabla_\theta\,\Big[\ell(z, y) + \frac{\lambda}{N}\sum_i \Delta(z_i, p^{y_i})\Big]

    and each prototype of a class with :math:`m_k` rows in the batch follows them as a running mean:

    .. math:: n_k \leftarrow \alpha\,n_k + m_k

    .. math:: p^k \leftarrow p^k + \frac{1}{n_k}\sum_{i:\,y_i=k}(z_i - p^k)

    (the paper's appendix, Equations 5 and 6). The first mean of a class is its first prototype. Until then its rows get
    no penalty. A step that learns from no row ages all prototypes, :math:`n_k \leftarrow \alpha\,n_k`; the penalty of a
    row with one class counts :math:`\min(1, n_k)` times.

    **Labels** are read from the gradient of a softmax cross-entropy of the model's logits
    (:mod:`dcl_optim.loss.cross_entropy`). For every other loss add the penalty to it: ``loss = criterion(z, y) +
    optimizer.penalty(z, y)``, which has the weight in it. Sigmoid outputs (binary, multi-label) and regression have no
    classes.

    Most scripts need no keyword argument. Those after ``process_group`` are the paper's, and ``strict``. The attribute
    ``base`` is the wrapped optimizer.

    Args:
        base_optimizer: the ``torch.optim`` optimizer to wrap.
        model: the model that it trains.
        weight: :math:`\lambda \ge 0`, a callable of the step (counted from 1), or ``"auto"`` (default), which grows
            from 0.1 to 1, with fewer than 100 classes to K/100, as the training accuracy grows; with
            ten or fewer it is 0.1. For other numbers pass an :class:`~dcl_optim.AutoWeight`,
            ``weight=AutoWeight(floor=0.05)``. The paper uses 1. May be set later too, ``optimizer.weight = 0.1``.
        num_classes: K, the number of classes and of logits; the prototypes take K² numbers, at most 1 GiB. None
            (default) for that of the first logits.
        logits: function of the model's output that returns the logits tensor. None (default) for the output itself,
            ``output.logits``, ``output["logits"]``, ``output["out"]`` or the first tensor with classes in a tuple.
        process_group: the ``torch.distributed.ProcessGroup`` over which class sums are added up; ``"auto"`` (default)
            for that of DistributedDataParallel, or of fully_shard's mesh; None for none. Where the ranks of one model
            are neither (DeepSpeed, gradients that the script averages) pass ``torch.distributed.group.WORLD``.
        alpha: :math:`\alpha \in [0, 1]`, or a callable of the step. Default 0.97. The paper's value is 0.6.
        update: ``"rows"`` (default) for the formula above, or ``"batch"`` for Equation 6,
            :math:`p^k \leftarrow \alpha\,p^k + (1-\alpha)\,\mathrm{mean}_k(z)`, which can diverge in long training.
        distance: :math:`\Delta`: ``"mse"`` (default; linear for distant rows), ``"squared"`` (the paper's), ``"l1"``,
            ``"kl"``, ``"infonce"``, or a function (z, c) of rows (N, K) that returns one value a row, (N,).
        strict: raise if a step finds gradients without a training forward pass, and if the weights were changed twice
            without a step. Default True.

    Raises:
        ValueError, TypeError: an argument is invalid, or the base optimizer does not train the model.
        RuntimeError: in backward, the labels of the first batches cannot be read, or of most in the first 100 steps.
        ValueError: in backward, the logits have another number of classes than before or than ``num_classes``, or more
            than memory allows; or the labels are the rows' places in the batch, and ``num_classes`` was not given.

    Warns:
        UserWarning: the labels of a later batch cannot be read, and it gets no penalty; a batch is not finite; weights
            were loaded into the model, and no state into the optimizer; there are several ranks, and no group; or the
            penalty with a given weight is large beside the loss of a guess, as where training diverges.

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

    The paper's settings: ``DCPOptimizer(optimizer, model, weight=1, alpha=0.6, update="batch", distance="squared")``.

    Source: R. Zhu and V. Saligrama, Deep Companion Learning, ECCV 2024, appendix. Where we differ: the weight, alpha,
    prototypes that count rows and not batches, and a distance that is linear for distant
    rows.
    """

    _name = "DCPOptimizer"
    forecaster: Prototypes

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        *,
        weight: Weight = "auto",
        num_classes: int | None = None,
        logits: Callable[[Any], Tensor] | None = None,
        process_group: Any = "auto",
        alpha: float | Schedule = 0.97,
        update: Literal["rows", "batch"] = "rows",
        distance: DistanceName | Distance = "mse",
        strict: bool = True,
    ) -> None:
        given = None if num_classes is None else check_integer("num_classes", num_classes)
        if update not in UPDATES:
            raise ValueError(f"update={update!r} is unknown; choose one of {', '.join(UPDATES)}")
        chosen = resolve_distance(distance)

        super().__init__(
            base_optimizer,
            model,
            lambda: Prototypes(given, update, chosen, model, DataParallelGroup(model, process_group)),
            weight=weight,
            alpha=alpha,
            logits=logits,
            strict=strict,
        )

    @outside_compiled_graphs
    def penalty(self, logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        r"""The weighted penalty :math:`\lambda\sum_i\Delta(z_i, p^{y_i})/n`, a term to add to any loss as returned.

        The weight :math:`\lambda` is in it: to multiply it by another factor than the loss is to change the weight.

        Autograd carries every factor of the loss. After its first call the hooks add nothing for the rest of the run:
        a step without a term has no penalty, and is counted in ``skipped``. The prototypes learn in its backward pass.
        With gradients off it is 0 and nothing is learned, so one function can serve training and validation. The mode
        of the model does not matter. Each call counts, also with the same logits. Soft labels that the script learns
        get no gradient from it.

        Args:
            logits: z, (N, K) or (N, K, d1, ...), of floating point: any tensor of logits, also flattened, divided by a
                temperature or masked. The prototypes are means of these.
            labels: class indices, (N,) or (N, d1, ...), or soft labels of the logits' shape. A GPU's values are not
                checked in each step.
            ignore_index: the label to leave out. Default -100, as in torch.

        Returns:
            A scalar in float32 or wider, differentiable once with respect to the logits; nan if one of them is nan or
            infinite, also of a row without a label. The mean is over the n rows with a label; a class that no step has
            seen contributes 0.

        Raises:
            TypeError, ValueError: logits or labels are of another kind or shape, labels are out of range, or the first
                logits are a sigmoid's, or those of the first eight rows are probabilities.
            RuntimeError: another optimizer has wrapped the model since, or ``detach`` was called; or in backward, with
                create_graph=True or after the step.

        Examples:
            >>> import torch
            >>> model = torch.nn.Linear(4, 3)
            >>> optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> z, y = model(torch.randn(16, 4)), torch.arange(16) % 3
            >>> loss = torch.nn.functional.multi_margin_loss(z, y) + optimizer.penalty(z, y)
            >>> loss.backward()
            >>> optimizer.step()

        Source: the paper's appendix, Equation 5.
        """
        if not self._is_for_training(logits):
            return nothing(logits)
        progress = self._algorithm.progress
        forward = Forward(logits, progress.number, copies=False)
        progress.forwards.add(forward)
        checked = labels_of(labels, logits, forward.may_read, ignore_index)
        return self._algorithm.term(logits, forward, checked)

    @property
    def prototypes(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero where no row has shown a value, (0, 0) before K is known."""
        return self.forecaster.values
