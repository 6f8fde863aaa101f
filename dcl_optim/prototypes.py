"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dcl_optim import _sync
from dcl_optim._validation import check_labels, check_tensors
from dcl_optim.distances import Distance, Rows, SquaredDistance, difference, to_rows, wide
from dcl_optim.distributed import DataParallelGroup
from dcl_optim.forecaster import Forecaster, Forward, Loss, Penalty

UPDATES = ("rows", "batch")
NO_ROWS, SOME_ROWS = 1e-30, 1e-20  # a number that counts as none but can be divided by; more than this are some
MAX_BYTES = 2**30  # of the (K, K) prototypes
IN_BATCH_STEPS = 16  # after which labels that were always the rows' places are no classes; values may be read in it
IN_BATCH = (
    "scores against the rows of a batch or a queue (in-batch negatives, CLIP, MoCo) have no classes.\n"
    "  Fix: use DCLOptimizer"
)
SHARE_TOLERANCE = 0.02  # of a share and of a row's sum; bfloat16 leaves up to 0.004 of a smoothed label's sum


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Prediction: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in the mean of class k. The penalty is :math:`\frac1n\sum_i w_i\,\delta(z_i, p^{y_i})` over the
    n rows with a label; :math:`w_i = 0` for a class that no step has seen.

    Args:
        num_classes, ignore_index, update: as in DCPOptimizer.
        like: a tensor whose device, and dtype at float32 or wider, the prototypes take.
        group: the ranks that train the model together.

    Examples:
        >>> group = DataParallelGroup(torch.nn.Linear(4, 3), process_group=None)
        >>> like = torch.zeros(())
        >>> Prototypes(3, ignore_index=-100, update="rows", like=like, group=group).values.shape
        torch.Size([3, 3])
    """

    replays_draws = False
    group: DataParallelGroup
    # Since the last step:
    _kept: list[tuple[Tensor, Tensor]]  # classes, and differences z - p, of rows
    _sums: Tensor | None  # of further differences, by class, (K + 1, K)
    _counts: Tensor | None  # the rows of each class, (K + 1,); infinite for no class

    def __init__(
        self,
        num_classes: int | None,
        ignore_index: int,
        update: str,
        like: Tensor,
        group: DataParallelGroup,
    ) -> None:
        self._given, self._ignore_index, self.group = num_classes, ignore_index, group
        self._by_rows = update == "rows"
        self._may_be_in_batch = num_classes is None  # so far each row's label was its place, of as many as classes
        self._create(num_classes or 0, like)
        self.forget()

    def _create(self, num_classes: int, like: Tensor) -> None:
        """Create the prototypes of this many classes; 0 as long as the number is not known."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        size = num_classes**2 * dtype.itemsize
        if size > MAX_BYTES:
            raise ValueError(
                f"num_classes={num_classes}: the prototypes would need {size / 2**30:.1f} GiB (limit 1 GiB); use "
                "DCLOptimizer, which has none"
            )
        # Row K is that of rows without a label: not a number, so that they contribute nothing.
        self._rows = torch.zeros(num_classes + 1, num_classes, dtype=dtype, device=like.device)
        self._rows[num_classes:] = torch.nan
        self._no_rows = self._rows.new_full((num_classes + 1,), NO_ROWS)  # of each class in an empty batch
        self._no_rows[num_classes:] = torch.inf
        self._numbers = self._no_rows.clone()  # n; 1 for a class that was seen, if each batch counts alike
        self._one = self._rows.new_ones(())
        self._all_known = False  # as far as is known without a synchronization

    @property
    def num_classes(self) -> int:
        """K; 0 before it is known."""
        return self._rows.shape[1]

    @property
    def seen(self) -> Tensor:
        """Which classes have a prototype, (K,) bool."""
        return self._numbers[:-1] > SOME_ROWS

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero for a class that no step has seen, (0, 0) before K is known."""
        return self._rows[:-1].clone()

    def figures(self) -> dict[str, Any]:
        """Mean norm, and root mean square margin: the logit of the own class less the mean of the others."""
        rows, number = self._rows[:-1], self.seen.sum()
        own = rows.diagonal()
        margins = own - (rows.sum(1) - own) / max(len(rows) - 1, 1)  # 0 for classes not seen
        return {
            "prototype_norm": rows.norm(dim=1).sum() / number,
            "prototype_margin": (margins.square().sum() / number).sqrt(),
        }

    def settings(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes or "not known yet"}

    def _known(self) -> Tensor:
        """1 for a class that was seen, else 0, (K + 1,)."""
        return (self._numbers > SOME_ROWS).to(self._rows)

    # ---- the penalty: 1/n Σ_i w_i δ(z_i, p^{y_i}) --------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng_state: Any, step: int) -> None:
        self.group.find()

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, rng_state: Any) -> None:
        """Nothing yet: the labels come with the gradient."""

    def penalty(self, forward: Forward, loss: Loss, distance: Distance) -> Penalty:
        if not self._rows.shape[1]:
            self._create(forward.rows.shape[1], forward.rows)
        if forward.rows.shape[1] != self._rows.shape[1]:
            refuse_width(forward, self.num_classes, is_given=self._given is not None)
        dtype = torch.promote_types(self._rows.dtype, forward.rows.dtype)
        z = forward.rows.to(dtype)
        if self._rows.device != z.device or self._rows.dtype != dtype:
            self._convert(z)
        labels, count = self._labels_of(forward, loss, z)
        # In another step than the one in which the reader synchronizes:
        if not self._all_known and _sync.may_sync(forward.step - 1, z):
            self._all_known = bool(self.seen.all())
        classes, shares = labels, None
        if labels.ndim == 1:
            c = self._rows.index_select(0, labels)
            weights = None if self._all_known else self._known().index_select(0, labels)
        else:
            classes, shares = self._columns(forward, labels.to(dtype))
            c = shares @ self._rows.index_select(0, classes)
            unknown = ((shares > 0) & (self._known().index_select(0, classes) == 0)).any(1)
            weights = ((shares.sum(1) > 0.5) & ~unknown).to(z.dtype)
        rows = self._rows_of_known(distance, z, c, labels, weights) if distance.couples_rows else distance.rows(z, c)
        forward.prediction = classes, shares, rows.slope if isinstance(distance, SquaredDistance) else None
        return Penalty(rows, count, weights, labels)

    def _rows_of_known(self, distance: Distance, z: Tensor, c: Tensor, labels: Tensor, weights: Tensor | None) -> Rows:
        """The distances of all rows, by a distance that gets those with a prototype alone; this synchronizes."""
        known = torch.ones_like(z[:, 0]) if weights is None else weights
        if labels.ndim == 1:
            known = known * (labels < self.num_classes)
        chosen = (known > 0).nonzero().flatten()
        values, slope = torch.zeros_like(z[:, 0]), torch.zeros_like(z)
        if len(chosen):
            found = distance.rows(z[chosen], c[chosen])
            values.index_copy_(0, chosen, found.values.to(z.dtype))
            slope.index_copy_(0, chosen, found.slope.to(z.dtype) * found.factor)
        return Rows(values, slope, 1.0)

    def _labels_of(self, forward: Forward, loss: Loss, z: Tensor) -> tuple[Tensor, float | Tensor]:
        """The label of each row (N,), K for none, or its shares (N, K); and the number of rows with a label."""
        labels = loss.labels
        assert labels is not None
        if loss.number is not None:  # read
            if self._may_be_in_batch and _sync.may_sync(forward.step, z):
                self._refuse_in_batch(forward.step, labels)
            if labels.ndim == 2 or not 0 <= self._ignore_index < self.num_classes:
                return labels, loss.number
            labels = labels.masked_fill(labels == self._ignore_index, self.num_classes)
        else:
            look = _sync.may_sync(forward.step, z)
            labels = to_labels(labels, forward, z, loss.class_dim, self.num_classes, self._ignore_index, look)
            if labels.ndim == 2:
                return labels, max(len(labels), 1)
        return labels, (labels < self.num_classes).sum(dtype=z.dtype).clamp(min=1)

    def _refuse_in_batch(self, step: int, labels: Tensor) -> None:
        hard = labels if labels.ndim == 1 else torch.where(labels.sum(1) > 0.5, labels.argmax(1), self.num_classes)
        labels, places = hard.cpu(), torch.arange(self.num_classes)  # rows of certain predictions may have no label
        found = labels.shape == places.shape and bool(((labels == places) | (labels == len(places))).all())
        self._may_be_in_batch = (found or not labels.any()) and self.num_classes > 2  # two are often in order, or all 0
        if self._may_be_in_batch and step >= IN_BATCH_STEPS:
            raise ValueError(
                f"in {step} steps the labels of each batch were 0 for all rows, or 0, 1, 2, ... up to its last logit: "
                f"{IN_BATCH}. If these are classes, pass num_classes={self.num_classes}"
            )

    def _columns(self, forward: Forward, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The classes of soft labels, (M,), and the shares in them, (N, M); all if values may not be read."""
        if not _sync.may_sync(forward.step, shares):
            return torch.arange(self.num_classes, device=shares.device), shares
        classes = (shares != 0).any(0).nonzero().flatten()
        return classes, shares.index_select(1, classes)

    # ---- learning: p^k ← p^k + 1/n_k Σ (z_i - p^k) -------------------------------------------------------------------

    def observe(self, forward: Forward, loss: Loss, penalty: Penalty, distance: Distance, alpha: float) -> None:
        self._alpha = alpha
        (classes, shares, apart), forward.prediction = forward.prediction, None
        numbers = self._one.expand(len(classes))
        if shares is not None:
            numbers, z = shares.sum(0), forward.rows.to(shares.dtype)
            apart = difference(shares.T @ z.nan_to_num(0.0, 0.0, 0.0), numbers[:, None] * self._rows[classes])
        elif apart is None:
            apart = difference(forward.rows.to(self._rows.dtype), self._rows.index_select(0, classes))
        if self._counts is None:
            self._counts = self._no_rows.clone()
        self._counts.index_add_(0, classes, numbers)
        # One sum for each class takes less than the rows of a large batch; the script may write to given labels.
        number = len(classes) + sum(map(len, map(itemgetter(0), self._kept)))
        if self._sums is not None or number > self._rows.shape[1] or self.group.size > 1:
            self._sum_by_class().index_add_(0, classes, apart)
        else:
            self._kept.append((classes.clone() if loss.number is None else classes, apart))

    def skip(self, forward: Forward, alpha: float) -> None:
        self._alpha = alpha
        if self._counts is None and self.group.size > 1:  # the others wait for this one's share in the sums
            self._counts = self._no_rows.clone()

    def _sum_by_class(self) -> Tensor:
        if self._sums is None:
            self._sums = self._no_rows.new_zeros(self._rows.shape)
            for classes, apart in self._kept:
                self._sums.index_add_(0, classes, apart)
            self._kept = []
        return self._sums

    def step(self) -> None:
        counts = self._counts
        if counts is None:
            return
        if self.group.size > 1:
            self.group.all_reduce_sum(counts[:-1])
            self.group.all_reduce_sum(self._sum_by_class())
        divisors, rate = self._divisors(counts)
        if self._sums is not None:
            self._rows[:-1].addcdiv_(self._sums[:-1], divisors[:-1, None], value=rate)
        for classes, apart in self._kept:
            apart = apart.div_(divisors.index_select(0, classes)[:, None])
            self._rows.index_add_(0, classes, apart, alpha=rate)
        self.forget()

    def _divisors(self, counts: Tensor) -> tuple[Tensor, float]:
        """What the sum of each class's differences is divided by, (K + 1,), and then multiplied by."""
        if self._by_rows:
            numbers = torch.add(counts, self._numbers, alpha=self._alpha)
            torch.where(counts > SOME_ROWS, numbers, self._numbers, out=self._numbers)
            return self._numbers, 1.0
        rate = 1.0 - self._alpha
        if self._all_known:
            return counts, rate
        # The first mean becomes the prototype. In ranks and in resumed runs it may be known at another step that all
        # classes are, and that must not show in the last bits.
        divisors = torch.where(self._numbers > SOME_ROWS, counts if rate else torch.inf, counts * (rate or 1.0))
        torch.maximum(self._numbers, (counts > SOME_ROWS).to(counts), out=self._numbers)
        return divisors, rate or 1.0

    def forget(self) -> None:
        self._kept, self._sums, self._counts, self._alpha = [], None, None, 0.0

    def _convert(self, z: Tensor) -> None:
        """Follow the model to another device, and to a wider dtype."""
        for name in ("_rows", "_numbers", "_no_rows", "_one", "_counts", "_sums"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.to(z))
        self._kept = [(classes.to(z.device), apart.to(z)) for classes, apart in self._kept]

    # ---- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "numbers": self._numbers[:-1].clone()}

    def check_state(self, state: dict[str, Any]) -> None:
        classes = len(state.get("numbers", ())) if self._given is None else self._given
        like = torch.empty(classes, classes, device="meta")
        check_tensors(state, {"values": like, "numbers": torch.empty(classes, device="meta")}, "prototypes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        values, numbers = state["values"], state["numbers"]
        if len(numbers) != self.num_classes:
            self._create(len(numbers), self._rows)
        self._rows[:-1] = values.to(self._rows)
        self._numbers[:-1] = numbers.to(self._numbers)
        self._all_known = self._may_be_in_batch = False


def refuse_width(forward: Forward, num_classes: int, is_given: bool) -> None:
    """Raise ValueError, since there are not as many logits in a row as classes."""
    shape, found = tuple(forward.logits.shape), forward.rows.shape[1]
    dims = [dim for dim, size in enumerate(shape) if dim and size == num_classes]
    fix = f"pass num_classes={found}" if is_given else "wrap the model again after a change of its classes"
    if dims:
        dim = -1 if dims[-1] == len(shape) - 1 else dims[0]
        fix = f"in its output of shape {shape} pass class_dim={dim}, along which it gives {num_classes}"
    elif len(forward.rows) == found:
        fix += f". Or {IN_BATCH}"
    if is_given:
        raise ValueError(f"num_classes={num_classes} but the model gives {found} logits; {fix}")
    raise ValueError(f"the first batch had {num_classes} logits a row, this one has {found}: {fix}")


def to_labels(
    targets: Any, forward: Forward, z: Tensor, class_dim: int, num_classes: int, ignore_index: int, look: bool
) -> Tensor:
    """Check labels: the class of each row (N,), K if ignored, or shares (N, K); values if ``look``."""
    check_labels(targets)
    if targets.dtype.is_floating_point and targets.shape == forward.logits.shape:
        shares = to_rows(targets.detach(), class_dim)
        if not look:
            return shares
        sums = wide(shares).sum(1)
        if not ((shares >= -SHARE_TOLERANCE).all() & ((sums - 1).abs() <= SHARE_TOLERANCE).all()):
            raise ValueError(
                f"targets has soft labels that are not distributions over {num_classes} classes (the least share is "
                f"{float(shares.min()):g}, rows sum to {float(sums.min()):g} up to {float(sums.max()):g}).\n"
                "  Fix: with sigmoid outputs (binary, multi-label) and regression use DCLOptimizer"
            )
        return shares
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise TypeError(
            f"targets of dtype {targets.dtype} and shape {tuple(targets.shape)} are neither class indices nor soft "
            f"labels of the logits' shape {tuple(forward.logits.shape)}"
        )
    if targets.numel() != len(z):
        raise ValueError(f"targets has {targets.numel()} labels for {len(z)} rows of logits; see class_dim= too")
    labels = targets.detach().reshape(-1).long()
    if look and len(labels):
        wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
        if wrong.any():
            raise ValueError(
                f"targets has label {int(labels[wrong][0])}; labels must lie in 0..{num_classes - 1} or equal "
                f"ignore_index={ignore_index}"
            )
    return labels.masked_fill(labels == ignore_index, num_classes)
