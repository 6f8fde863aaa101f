r"""The measures of :mod:`dcl_optim.metrics` over batches, as ``torchmetrics.Metric`` classes.

Use them where the logits do not fit in one tensor: with ``update``, ``compute`` and ``reset`` in a loop, in a
``MetricCollection``, or in Lightning's ``self.log``. The states are sums, so that batches may arrive in any order and
on any rank. A collection whose metrics take different arguments gets all of them by keyword.

Needs the extra ``metrics``.

Examples:
    >>> from torchmetrics import MetricCollection
    >>> metrics = MetricCollection([TopNonTargetConsistency(num_classes=3), LogitDrift()])
    >>> logits, labels = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0]]), torch.tensor([0, 0])
    >>> metrics.update(logits=logits, labels=labels, logits_before=logits, logits_after=logits + 1)
    >>> sorted(metrics.compute().items())
    [('LogitDrift', tensor(1.7321)), ('TopNonTargetConsistency', tensor(0.5000))]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim.metrics.drift import logit_drift
from dcl_optim.metrics.non_targets import consistency_from_counts, perplexity_from_counts, top_non_target_counts

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError('dcl_optim.metrics.streaming needs torchmetrics: pip install "dcl-optim[metrics]"') from error

AVERAGES = ("macro", "none")


class _Sums(Metric):
    """States that batches add to, and the dtype of the value: float64 as soon as one batch is, else float32."""

    is_differentiable = False
    full_state_update = False
    float64_batches: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("float64_batches", torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, logits: Tensor, **summands: Tensor) -> None:
        is_float64 = torch.tensor(int(logits.dtype == torch.float64), device=logits.device)
        for name, summand in {"float64_batches": is_float64, **summands}.items():
            # Whatever dtype the metric was moved to: half precision would stop counting at 2048.
            setattr(self, name, getattr(self, name).to(summand.dtype) + summand)

    def _value_dtype(self) -> torch.dtype:
        return torch.float64 if self.float64_batches > 0 else torch.float32


class _TopNonTargets(_Sums):
    """Counts of the pairs of a sample's class and its top non-target, (K, K)."""

    counts: Tensor

    def __init__(self, num_classes: int, average: str = "macro", **kwargs: Any) -> None:
        if not isinstance(num_classes, int) or num_classes < 2:
            raise ValueError(f"num_classes is {num_classes!r}; it must be an integer of at least 2")
        if average not in AVERAGES:
            raise ValueError(f"average is {average!r}; it must be one of {', '.join(AVERAGES)}")
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.average = average
        self.add_state("counts", torch.zeros(num_classes, num_classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: floating point, (N, K) with K of ``num_classes``; N may be 0.
            labels: integer classes in 0..K-1, (N,).

        Raises:
            ValueError: the shapes, dtypes or labels are not those.
        """
        counts = top_non_target_counts(logits, labels)
        if len(counts) != self.num_classes:
            raise ValueError(f"logits has {len(counts)} classes; it must have num_classes = {self.num_classes}")
        self._add(logits, counts=counts)

    def _averaged(self, per_class: Tensor) -> Tensor:
        return per_class.nanmean() if self.average == "macro" else per_class


class TopNonTargetConsistency(_TopNonTargets):
    r"""Accumulate the share of each class's samples that have its most frequent top non-target.

    .. math:: \max_{k \ne c} p(k|c)

    The value is bit for bit that of :func:`~dcl_optim.metrics.top_non_target_consistency` on all batches in one.

    Args:
        num_classes: K, at least 2.
        average: ``"macro"`` for the mean over the classes that had a sample, a scalar; ``"none"`` for each class's
            value, (K,), nan for a class without. Default: ``"macro"``.
        kwargs: those of ``torchmetrics.Metric``.

    Raises:
        ValueError: num_classes or average is not one of those.

    Examples:
        >>> consistency = TopNonTargetConsistency(num_classes=3, average="none")
        >>> consistency.update(torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0]]), torch.tensor([0, 0]))
        >>> consistency.update(torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([1]))
        >>> consistency.compute()
        tensor([0.5000, 1.0000,    nan])

    Source: Section 3.4 and Figure 2.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Compute the consistency over all batches since the start or the last ``reset``."""
        return self._averaged(consistency_from_counts(self.counts, self._value_dtype()))


class NonTargetPerplexity(_TopNonTargets):
    r"""Accumulate the perplexity of each class's top non-targets.

    .. math:: PP_c = \prod_{k \ne c} p(k|c)^{-p(k|c)}

    The value is bit for bit that of :func:`~dcl_optim.metrics.non_target_perplexity` on all batches in one.

    Args:
        num_classes: K, at least 2.
        average: ``"macro"`` for the mean over the classes that had a sample, a scalar; ``"none"`` for each class's
            value, (K,), nan for a class without. Default: ``"macro"``.
        kwargs: those of ``torchmetrics.Metric``.

    Raises:
        ValueError: num_classes or average is not one of those.

    Examples:
        >>> perplexity = NonTargetPerplexity(num_classes=3)
        >>> perplexity.update(torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0]]), torch.tensor([0, 0]))
        >>> perplexity.update(torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([1]))
        >>> perplexity.compute()  # of 2 for class 0 and 1 for class 1
        tensor(1.5000)

    Source: Section 3.4 and Figure 3.
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Compute the perplexity over all batches since the start or the last ``reset``."""
        return self._averaged(perplexity_from_counts(self.counts, self._value_dtype()))


class LogitDrift(_Sums):
    r"""Accumulate the mean distance that the samples' logits moved.

    .. math:: d = \frac1N\sum_i\lVert z'_i - z_i\rVert_2

    The value is that of :func:`~dcl_optim.metrics.logit_drift` on all batches in one, in the same dtype, up to that
    function's rounding: the sum of the distances is float64, which the metric's device must support (MPS does not).
    Without a batch the value is nan.

    Args:
        kwargs: those of ``torchmetrics.Metric``.

    Examples:
        >>> drift = LogitDrift()
        >>> drift.update(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        >>> drift.update(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        >>> drift.compute()
        tensor(3.)

    Source: Figure 5, whose d is an average distance in the space of logits; the paper gives no formula.
    """

    distances: Tensor
    samples: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("distances", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits_before: Tensor, logits_after: Tensor) -> None:
        """Add a batch.

        Args:
            logits_before: logits of an earlier model, (N, K), N and K at least 1.
            logits_after: logits of a later model on the same samples, (N, K).

        Raises:
            ValueError: the shapes are not those.
        """
        mean = logit_drift(logits_before.double(), logits_after.double())
        samples = torch.tensor(len(logits_before), device=mean.device)
        self._add(logits_before, distances=mean * samples, samples=samples)

    def compute(self) -> Tensor:
        """Compute the mean distance over all batches since the start or the last ``reset``."""
        return (self.distances / self.samples).to(self._value_dtype())
