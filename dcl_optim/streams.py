r"""The measures of :mod:`dcl_optim.metrics` over batches, for data that does not fit in one tensor of logits.

Each stream has torchmetrics' three methods: ``update`` takes a batch, ``compute`` gives the measure of all batches
since the start or the last ``reset``. A stream remembers sums and nothing else, so batches may come in any order, and
the sums of several processes may be added. torchmetrics itself is not needed; :func:`as_torchmetric` makes one of its
metrics of a stream, for a ``MetricCollection`` or for Lightning's ``self.log``.

Letters: N samples in a batch, K classes.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcl_optim.metrics import logit_drift, top_non_target_counts

if TYPE_CHECKING:
    from torchmetrics import Metric

AVERAGES = ("macro", "none")


class Stream(ABC):
    """Sums over batches, and the measure that is a function of them.

    Attributes:
        sums: what the batches so far add up to, by name, on the device of the last batch.
    """

    sums: dict[str, Tensor]

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.sums = self.zeros()

    def compute(self) -> Tensor:
        """Give the measure of all batches since the start or the last reset."""
        return self.value(self.sums)

    @abstractmethod
    def update(self, first: Tensor, second: Tensor, /) -> None:
        """Take a batch."""

    @abstractmethod
    def zeros(self) -> dict[str, Tensor]:
        """Give the sums over no sample."""

    @abstractmethod
    def summands(self, first: Tensor, second: Tensor, /) -> dict[str, Tensor]:
        """Give what a batch adds to the sums."""

    @abstractmethod
    def value(self, sums: dict[str, Tensor]) -> Tensor:
        """Give the measure that belongs to the sums."""

    def _add(self, summands: dict[str, Tensor]) -> None:
        self.sums = {name: self.sums[name].to(summand.device) + summand for name, summand in summands.items()}


class _TopNonTargets(Stream):
    """Counts of the pairs of a sample's class and its top non-target, (K, K)."""

    def __init__(self, num_classes: int, average: str = "macro") -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}; it must be at least 2")
        if average not in AVERAGES:
            raise ValueError(f"average is {average!r}; it must be one of {', '.join(AVERAGES)}")
        self.num_classes = num_classes
        self.average = average
        super().__init__()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Take a batch.

        Args:
            logits: floating point, (N, K); N may be 0.
            labels: integer classes in 0..K-1, (N,).

        Raises:
            ValueError: shapes, dtypes or labels other than these.
        """
        self._add(self.summands(logits, labels))

    def zeros(self) -> dict[str, Tensor]:
        counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.long)
        return {"counts": counts, "double_batches": torch.tensor(0)}

    def summands(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        counts = top_non_target_counts(logits, labels)
        if len(counts) != self.num_classes:
            raise ValueError(f"logits has {len(counts)} classes; it must have num_classes = {self.num_classes}")
        return {"counts": counts, "double_batches": _is_double(logits)}

    def value(self, sums: dict[str, Tensor]) -> Tensor:
        counts = sums["counts"].to(_dtype(sums))
        samples = counts.sum(1, keepdim=True)
        per_class = self._measure(counts / samples.clamp(min=1)).masked_fill(samples[:, 0] == 0, float("nan"))
        return per_class.nanmean() if self.average == "macro" else per_class

    @abstractmethod
    def _measure(self, shares: Tensor) -> Tensor:
        """Give each class's value from the rows p(k|c), (K, K)."""


class TopNonTargetConsistency(_TopNonTargets):
    r"""Share of each class's samples that agree on its most frequent top non-target, :math:`\max_{k \ne c} p(k|c)`.

    The same value to the last bit as :func:`dcl_optim.metrics.top_non_target_consistency` of all batches in one.

    Args:
        num_classes: K, at least 2.
        average: "macro" for the mean over the classes seen, a scalar; "none" for each class's value, (K,), nan for a
            class not seen. Default: "macro".

    Raises:
        ValueError: another num_classes or average.

    Examples:
        >>> consistency = TopNonTargetConsistency(num_classes=3, average="none")
        >>> consistency.update(torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0]]), torch.tensor([0, 0]))
        >>> consistency.update(torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([1]))
        >>> consistency.compute()
        tensor([0.5000, 1.0000,    nan])

    Source: Section 3.4 and Figure 2.
    """

    def _measure(self, shares: Tensor) -> Tensor:
        return shares.amax(1)


class NonTargetPerplexity(_TopNonTargets):
    r"""Perplexity of each class's top non-targets, :math:`PP_c = \prod_{k \ne c} p(k|c)^{-p(k|c)}`.

    The same value to the last bit as :func:`dcl_optim.metrics.non_target_perplexity` of all batches in one.

    Args:
        num_classes: K, at least 2.
        average: "macro" for the mean over the classes seen, a scalar; "none" for each class's value, (K,), nan for a
            class not seen. Default: "macro".

    Raises:
        ValueError: another num_classes or average.

    Examples:
        >>> perplexity = NonTargetPerplexity(num_classes=3)
        >>> perplexity.update(torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0]]), torch.tensor([0, 0]))
        >>> perplexity.update(torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([1]))
        >>> perplexity.compute()  # of 2 for class 0 and 1 for class 1
        tensor(1.5000)

    Source: Section 3.4 and Figure 3.
    """

    def _measure(self, shares: Tensor) -> Tensor:
        return torch.special.entr(shares).sum(1).exp()


class LogitDrift(Stream):
    r"""Mean distance that the samples' logits moved, :math:`\frac1N\sum_i\lVert z'_i - z_i\rVert_2`.

    Distances are added in float64. The value is that of :func:`dcl_optim.metrics.logit_drift` of all batches in one, up
    to that function's own rounding, in the same dtype.

    Examples:
        >>> drift = LogitDrift()
        >>> drift.update(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        >>> drift.update(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
        >>> drift.compute()
        tensor(3.)

    Source: Figure 5, as for :func:`dcl_optim.metrics.logit_drift`.
    """

    def update(self, logits_before: Tensor, logits_after: Tensor) -> None:
        """Take a batch.

        Args:
            logits_before: logits of an earlier model, (N, K).
            logits_after: logits of a later model on the same samples, (N, K).

        Raises:
            ValueError: shapes other than these, or no samples.
        """
        self._add(self.summands(logits_before, logits_after))

    def compute(self) -> Tensor:
        """Give the mean distance of all samples since the start or the last reset.

        Raises:
            ValueError: there was none.
        """
        return super().compute()

    def zeros(self) -> dict[str, Tensor]:
        return {
            "distances": torch.tensor(0.0, dtype=torch.float64),
            "samples": torch.tensor(0),
            "double_batches": torch.tensor(0),
        }

    def summands(self, logits_before: Tensor, logits_after: Tensor) -> dict[str, Tensor]:
        mean = logit_drift(logits_before.double(), logits_after.double())
        samples = len(logits_before)
        return {
            "distances": mean * samples,
            "samples": torch.tensor(samples, device=mean.device),
            "double_batches": _is_double(logits_before),
        }

    def value(self, sums: dict[str, Tensor]) -> Tensor:
        if sums["samples"] == 0:
            raise ValueError("there is no sample to average over: call update before compute")
        return (sums["distances"] / sums["samples"]).to(_dtype(sums))


def as_torchmetric(stream: Stream) -> Metric:
    """Make a ``torchmetrics.Metric`` of a stream, whose sums torchmetrics then keeps and adds over processes.

    It starts empty, is named as the stream's class, and leaves the stream alone. Where a collection holds measures of
    other arguments too, pass them all by keyword: each takes its own.

    Args:
        stream: the measure.

    Raises:
        ImportError: torchmetrics is missing.

    Examples:
        >>> from torchmetrics import MetricCollection
        >>> metrics = MetricCollection([as_torchmetric(TopNonTargetConsistency(3)), as_torchmetric(LogitDrift())])
        >>> logits, labels = torch.tensor([[5.0, 1.0, 2.0], [5.0, 4.0, 2.0]]), torch.tensor([0, 0])
        >>> metrics.update(logits=logits, labels=labels, logits_before=logits, logits_after=logits + 1)
        >>> sorted(metrics.compute().items())
        [('LogitDrift', tensor(1.7321)), ('TopNonTargetConsistency', tensor(0.5000))]
    """
    return _metric_class(stream)()


def _metric_class(stream: Stream) -> type[Metric]:
    try:
        from torchmetrics import Metric
    except ImportError as error:
        raise ImportError('as_torchmetric needs torchmetrics: pip install "dcl-optim[integrations]"') from error

    class StreamMetric(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            for name, zero in stream.zeros().items():
                self.add_state(name, zero, dist_reduce_fx="sum")

        def update(self, *batch: Tensor, **named: Tensor) -> None:
            for name, summand in stream.summands(*batch, **named).items():
                setattr(self, name, getattr(self, name) + summand)

        def compute(self) -> Tensor:
            return stream.value({name: getattr(self, name) for name in self._defaults})

        def __reduce__(self) -> tuple[Any, ...]:
            # A class made inside a function cannot be pickled by its name.
            return _unpickled, (stream,), self.__getstate__()

    # A collection names metrics by their class, and picks each one's keyword arguments by this signature.
    StreamMetric.__name__ = type(stream).__name__
    StreamMetric.update.__signature__ = inspect.signature(type(stream).update)  # type: ignore[attr-defined]
    return StreamMetric


def _unpickled(stream: Stream) -> Metric:
    made = _metric_class(stream)
    return made.__new__(made)


def _is_double(logits: Tensor) -> Tensor:
    return torch.tensor(int(logits.dtype == torch.float64), device=logits.device)


def _dtype(sums: dict[str, Tensor]) -> torch.dtype:
    """Give the dtype of the batches in one: float64 as soon as one has it."""
    return torch.float64 if sums["double_batches"] > 0 else torch.float32
