"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dcl_optim import distances
from dcl_optim._torch import warn
from dcl_optim._validation import check_tensors
from dcl_optim.distances import Distance
from dcl_optim.distributed import Ranks
from dcl_optim.forecaster import LOOK_EVERY, Forecaster, ForwardRecord, Scale
from dcl_optim.prototypes.targets import check_width, to_classes

REDUCTIONS = ("mean", "per_class")
MOST_BYTES = 2**30  # of the (K, K) prototypes
# How far a prototype's own class is above the mean of the others. A healthy one reaches about 12 with 10 classes and
# with 150. Where it is 17 above each of them, the cross-entropy of these logits is 0 in float32.
MOST_MARGIN = 50.0
MOST_GROWTH = 4.0  # since the first look: a pretrained model's logits may be far apart from the beginning


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Forecast: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in class k's mean, which for one-hot labels is the same thing. Rows of an ignored label, and
    of a class that no step has seen, have no forecast and give no penalty. Learning, with :math:`n_k` rows of class k:

    .. math:: p^k \leftarrow p^k + \tfrac{1-\alpha}{n_k}\sum_{i:\,y_i=k}(z_i - p^k)
        = \alpha\,p^k + (1-\alpha)\,\mathrm{mean}_k(z)

    In this form a step of one process touches no more than the rows of the batch's classes. The first mean becomes the
    prototype.

    Args:
        num_classes: K, at least 1; the logits must have as many. None for as many as the first logits have.
        per_class: average the penalty within each class and sum over the classes (one reading of Equation 5)
            instead of averaging over the batch.
        ignore_index: the label of rows to leave out.
        like: a tensor whose device, and dtype at float32 or wider, the prototypes take.
        ranks: the ranks that train the model together.

    Raises:
        ValueError: the prototypes of all classes would take more than 1 GiB.

    Examples:
        >>> ranks = Ranks(torch.nn.Linear(4, 3), process_group=None)
        >>> Prototypes(3, per_class=False, ignore_index=-100, like=torch.zeros(()), ranks=ranks).values.shape
        torch.Size([3, 3])
    """

    replays_draws = False
    # Since the last step:
    _kept: list[tuple[Tensor, Tensor]]  # classes, and differences z - p of one each
    _num_kept: int  # rows of these
    _sums: Tensor | None  # of other differences, one for each class, (K + 1, K)
    _counts: Tensor | None  # the rows of each class, (K + 1,)
    _first_look: tuple[int, float] | None = None  # its step, and the prototypes' margin then
    _has_told_growth = False

    def __init__(self, num_classes: int | None, per_class: bool, ignore_index: int, like: Tensor, ranks: Ranks) -> None:
        self._given, self._per_class, self._ignore_index, self._ranks = num_classes, per_class, ignore_index, ranks
        self._has_checked_shares = self._has_told = False
        self._difference: Tensor | None = None  # z - p of the penalty that was computed last, with hard labels
        self._create(num_classes or 0, like)
        self.forget()

    def _create(self, num_classes: int, like: Tensor) -> None:
        """Create the prototypes of so many classes; 0 as long as their number is not known."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        size = num_classes**2 * dtype.itemsize
        if size > MOST_BYTES:
            raise ValueError(
                f"num_classes={num_classes}: the prototypes, a vector of logits for each class, would take "
                f"{size / 2**30:.1f} GiB, more than 1; take DCLOptimizer, which has none"
            )
        self._num_classes = num_classes
        # Row K is of no class, and stays zero: ignored labels are K.
        self._rows = torch.zeros(num_classes + 1, num_classes, dtype=dtype, device=like.device)
        self._seen = torch.zeros(num_classes + 1, dtype=torch.bool, device=like.device)
        self._all_seen = False  # as far as is known without synchronising a device

    @property
    def seen(self) -> Tensor:
        """Which classes have a prototype, (K,) bool."""
        return self._seen[:-1]

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero for a class that no step has seen, (0, 0) where K is not known yet."""
        return self._rows[:-1].clone()

    def figures(self) -> dict[str, Any]:
        return {"prototype_norm": self.values[self.seen].norm(dim=1).mean()}  # nan without a row

    def settings(self) -> dict[str, Any]:
        return {"num_classes": self._num_classes or "not known yet"}

    # ---- the penalty: 1/N Σ_i Δ(z_i, p^{y_i}) ------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: Any, step: int) -> None:
        self._ranks.find()
        if step % LOOK_EVERY == 0:
            self._look_for_growth(step)

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], record: ForwardRecord, rng_state: Any) -> None:
        """Nothing yet: the labels come with the criterion or the gradient."""

    def penalty(self, record: ForwardRecord, distance: Distance) -> tuple[Tensor, Tensor]:
        self._difference = None
        if record.is_open and record.targets is None and record.criterion_targets is None:
            return record.logits.new_zeros(()), torch.zeros_like(record.logits)  # no row of it has a label
        if not self._num_classes:
            self._create(record.logits.shape[1], self._rows.to(record.logits))
        self._follow_place(record.logits)
        z = record.logits.to(self._rows.dtype)
        classes = self._classes_of(record)
        if self._per_class:
            return self._penalty_per_class(z, classes, distance)
        record.forecast, known = self._forecast(record, classes)
        labelled = max(len(classes), 1) if record.all_labelled else self._count_labelled(classes)
        if distance is distances.mse:
            differences = self._difference = distances.difference(z, record.forecast)
            if known is not None:
                differences = differences.masked_fill(~known[:, None], 0.0)
            return distances.squared(differences, labelled * self._num_classes)
        if known is None:
            return distances.value_and_gradient(distance, z, record.forecast)
        return _penalty_of_some(z, record.forecast, known, labelled, distance)

    def _classes_of(self, record: ForwardRecord) -> Tensor:
        """The class of each row (N,), K where ignored, or its shares in all classes (N, K)."""
        if record.classes is None:
            given = record.criterion_targets if record.targets is None else record.targets
            if given is None and record.read_labels is not None:
                record.classes, record.all_labelled = self._of_read(*record.read_labels, record)
                return record.classes
            look = not self._has_checked_shares
            record.classes, record.all_labelled = to_classes(given, record, self._num_classes, self._ignore_index, look)
            self._has_checked_shares |= record.classes.ndim == 2
        return record.classes

    def _of_read(self, labels: Tensor, all_labelled: bool, record: ForwardRecord) -> tuple[Tensor, bool]:
        """Labels that the gradient told, without those that are ignored although the loss does not."""
        check_width(record, self._num_classes)
        if 0 <= self._ignore_index < self._num_classes:
            return labels.masked_fill(labels == self._ignore_index, self._num_classes), False
        return labels, all_labelled

    def _forecast(self, record: ForwardRecord, classes: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows' forecasts, (N, K), and which rows have one; None for all."""
        if classes.ndim == 1:
            forecast = self._rows.index_select(0, classes)
            if self._all_seen and record.all_labelled:
                return forecast, None
            known = self._seen.index_select(0, classes)
        else:
            columns, shares = self._columns(classes.to(self._rows.dtype))
            forecast = shares @ self._rows.index_select(0, columns)
            known = ~((shares > 0) & ~self._seen.index_select(0, columns)).any(1)
        looked = known.device.type == "cpu" and bool(known.all())
        return forecast, None if looked else known

    def _columns(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The classes that soft labels are about, (M,), and each row's shares in them, (N, M).

        On an accelerator all classes, since finding those that have a share would synchronise it.
        """
        if shares.device.type != "cpu":
            return torch.arange(self._num_classes, device=shares.device), shares
        classes = (shares != 0).any(0).nonzero().flatten()
        return classes, shares.index_select(1, classes)

    def _count_labelled(self, classes: Tensor) -> float | Tensor:
        if classes.ndim == 2:
            return max(len(classes), 1)
        count = (classes < self._num_classes).sum(dtype=self._rows.dtype).clamp(min=1)
        return count.item() if count.device.type == "cpu" else count

    def _penalty_per_class(self, z: Tensor, classes: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
        if classes.ndim == 2:
            raise TypeError("reduction='per_class' needs hard labels; soft labels belong to several classes at once")
        rows = self._seen.index_select(0, classes).nonzero().flatten()
        if not len(rows):
            return z.new_zeros(()), torch.zeros_like(z)
        rows = rows[classes[rows].argsort(stable=True)]
        classes = classes[rows]
        sizes = classes.unique_consecutive(return_counts=True)[1].tolist()

        def summed(z: Tensor, forecast: Tensor) -> Tensor:
            parts = zip(z.split(sizes), forecast.split(sizes), strict=True)
            return torch.stack([distance(*part) for part in parts]).sum()

        value, gradient = distances.value_and_gradient(summed, z[rows], self._rows[classes])
        return value, torch.zeros_like(z).index_copy_(0, rows, gradient)

    # ---- learning: p^k ← p^k + (1 - α)/n_k Σ (z_i - p^k) -------------------------------------------------------------

    def observe(self, record: ForwardRecord, distance: Distance, alpha: float, scale: Scale) -> None:
        self._alpha = alpha
        z, classes = record.logits.to(self._rows.dtype), record.classes
        if classes is None:
            return self.skip(record, alpha)
        if classes.ndim == 2:
            classes, shares = self._columns(classes.to(z.dtype))
            known = self._finite_rows(z.abs(), record.finite)
            if known is not None:
                z, shares = z.masked_fill(~known[:, None], 0.0), shares * known[:, None]
            numbers = shares.sum(0)
            differences = (shares.T @ z).addcmul_(numbers[:, None], self._rows.index_select(0, classes), value=-1.0)
        else:
            found, numbers = self._difference, z.new_ones(len(classes))
            differences = distances.difference(z, self._rows.index_select(0, classes)) if found is None else found
            if not record.all_labelled:
                labelled = classes < self._num_classes
                differences, numbers = differences.masked_fill(~labelled[:, None], 0.0), labelled.to(z.dtype)
            known = None if self._all_seen and record.finite is True else self._finite_rows(differences, record.finite)
            if known is not None:
                differences, numbers = differences.masked_fill(~known[:, None], 0.0), numbers * known
        self._difference = None
        if self._counts is None:
            self._counts = z.new_zeros(self._num_classes + 1)
        self._counts.index_add_(0, classes, numbers)
        self._num_kept += len(classes)
        if self._num_kept > self._num_classes:  # a sum for each class is less
            self._kept.append((classes, differences))
            self._sum_by_class()
        else:  # of the classes a copy: the script may write the next batch's labels into that tensor before the step
            self._kept.append((classes.clone(), differences))

    def skip(self, record: ForwardRecord, alpha: float) -> None:
        self._alpha, self._difference = alpha, None
        if self._counts is None and self._ranks.count > 1:  # the others wait for this one's share in the sums
            self._counts = self._rows.new_zeros(self._num_classes + 1)

    def _finite_rows(self, rows: Tensor, finite: bool | Tensor) -> Tensor | None:
        """Which rows can be learned from, (N,) bool; None for all. Minus infinity is what a masked class starts at.

        The penalty speaks for the rows of classes that have a prototype alone.
        """
        if isinstance(finite, Tensor):
            return (rows.sum(1) < torch.inf) & finite
        if rows.sum() < torch.inf:
            return None
        self._left_out = True
        return rows.sum(1) < torch.inf

    def _sum_by_class(self) -> Tensor:
        """Add the differences that are kept to one sum for each class."""
        if self._sums is None:
            self._sums = torch.zeros_like(self._rows)
        for classes, differences in self._kept:
            self._sums.index_add_(0, classes, differences)
        self._kept, self._num_kept = [], 0
        return self._sums

    def step(self) -> None:
        counts = self._counts
        if counts is None:
            return
        if self._left_out and not self._has_told:
            self._has_told = True
            warn("rows of logits that are not finite have no part in the prototypes")
        if self._ranks.count > 1:
            self._ranks.add_up(counts)
            self._ranks.add_up(self._sum_by_class())
        weights = (1.0 - self._alpha) / counts.clamp(min=1e-30)  # a class without rows has differences of zero
        if not self._all_seen:
            weights = torch.where(self._seen, weights, counts.clamp(min=1e-30).reciprocal())
            self._seen |= counts > 0
            self._all_seen = counts.device.type == "cpu" and bool(self.seen.all())
        if self._sums is not None:
            self._rows.addcmul_(self._sums, weights[:, None])
        for classes, differences in self._kept:
            self._rows.index_add_(0, classes, differences * weights.index_select(0, classes)[:, None])
        self.forget()

    def _look_for_growth(self, step: int) -> None:
        """Say once that the prototypes run away: that their margins grow beyond what a cross-entropy needs.

        The margin is a prototype's logit of its own class minus the mean of the others, the root mean square over the
        classes seen. What all logits have in common, and may be large, is left out. Nothing of it is in the state:
        after loading one the first look is the next.
        """
        own = self._rows[:-1].diagonal()
        margins = own - (self._rows[:-1].sum(1) - own) / max(self._num_classes - 1, 1)  # 0 for classes not seen
        margin = float((margins.square().sum() / self._seen.sum()).sqrt())
        if self._first_look is None:
            self._first_look = (step, margin) if 0 < margin < math.inf else None
        elif not self._has_told_growth and max(MOST_MARGIN, MOST_GROWTH * self._first_look[1]) < margin < math.inf:
            self._has_told_growth = True
            before, first = self._first_look
            warn(
                f"the prototypes run away: by step {step} a prototype's logit of its own class is {margin:.3g} above "
                f"the mean of the others, {margin / first:.2g} times as far as in step {before} and further than a "
                "cross-entropy needs. The prototypes and the model's logits make each other grow, which costs accuracy "
                "in time: pass an alpha nearer to 1 (the default is 0.97), "
                'reduction="per_class" with weight divided by the number of classes in a batch, or batches with '
                "equally many rows of each class"
            )

    def forget(self) -> None:
        self._kept, self._num_kept, self._sums, self._counts = [], 0, None, None
        self._difference, self._alpha, self._left_out = None, 0.0, False

    def _follow_place(self, z: Tensor) -> None:
        """Follow the model to another device, and to a wider dtype."""
        dtype = torch.promote_types(self._rows.dtype, z.dtype)
        if self._rows.device != z.device or self._rows.dtype != dtype:
            self._rows, self._seen = self._rows.to(z.device, dtype), self._seen.to(z.device)
            self._kept = [(classes.to(z.device), kept.to(z.device, dtype)) for classes, kept in self._kept]
            self._counts = None if self._counts is None else self._counts.to(z.device, dtype)
            self._sums = None if self._sums is None else self._sums.to(z.device, dtype)

    # ---- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "seen": self.seen.clone()}

    def check_state(self, state: dict[str, Any]) -> None:
        classes = self._given
        if classes is None:  # as many as were saved
            classes = len(state.get("seen", ()))
        whole = torch.empty(classes, classes, device="meta")
        check_tensors(state, {"values": whole, "seen": torch.empty(classes, device="meta")}, "prototypes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        self._first_look = None
        device = self._rows.device
        classes = state["seen"].nonzero().flatten().to(device)
        rows = state["values"].to(device)[classes]
        finite = rows.sum(1) < torch.inf  # a damaged state may hold nan
        if not finite.all():
            lost = classes[~finite].tolist()
            warn(f"the prototypes of classes {lost[:5]} are not finite in this state: they start anew, as if not seen")
            classes, rows = classes[finite], rows[finite]
        if rows.shape[1] != self._num_classes:
            self._create(rows.shape[1], self._rows)
        self._rows = torch.zeros_like(self._rows).index_copy_(0, classes, rows.to(self._rows.dtype))
        self._seen = torch.zeros_like(self._seen).index_fill_(0, classes, True)
        self._all_seen = self._seen.device.type == "cpu" and bool(self.seen.all())


def _penalty_of_some(
    z: Tensor, forecast: Tensor, known: Tensor, labelled: float | Tensor, distance: Distance
) -> tuple[Tensor, Tensor]:
    """The penalty of the rows that have a forecast, averaged over the labelled ones."""
    if getattr(distance, "func", distance) in (distances.l1, distances.kl):
        # These vanish, with their gradient, where the forecast is z itself: no need to know which rows.
        share = len(z) / labelled
        value, gradient = distances.value_and_gradient(distance, z, torch.where(known[:, None], forecast, z))
        return value * share, gradient * share
    if not known.any():
        return z.new_zeros(()), torch.zeros_like(z)
    share = known.sum() / labelled
    value, gradient = distances.value_and_gradient(distance, z[known], forecast[known])
    return value * share, torch.zeros_like(z).masked_scatter_(known[:, None], gradient * share)
