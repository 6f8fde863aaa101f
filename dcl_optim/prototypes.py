"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim import distributed, functional, infinities
from dcl_optim.forecaster import Forecaster, Forward, Scale, check_tensors
from dcl_optim.functional import Distance
from dcl_optim.membership import read_membership

REDUCTIONS = (*functional.REDUCTIONS, "per_class")
MEMORY_LIMIT = 2**30  # bytes that the prototypes may take: 16,384 classes in float32

# Sums of z_i - p^k, and how many rows each is of: classes (M,) in 0..K, where K stands for "of no class"; sums (M, K);
# counts (M,), which are the shares' totals for soft labels. A class may come several times; class K's are zeros.
Departures = tuple[Tensor, Tensor, Tensor]


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Forecast: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in class k's mean, which for one-hot labels is the same thing. Rows of an ignored label, and
    of a class that no step has seen, have no forecast and give no penalty.

    They are one (K, K) tensor. In one process a step reads and writes only the rows of its batch's classes; several
    processes add up the sums and counts of all K classes, so that all hold the same bits.

    Args:
        num_classes: K, at least 1; the logits must have as many.
        per_class: average the penalty within each class and sum over the classes (one reading of Equation 5)
            instead of averaging over the batch.
        ignore_index: the label of rows to leave out.
        like: a tensor whose device, and dtype at float32 or wider, the prototypes take.

    Raises:
        ValueError: so many classes that the prototypes would take more than 1 GiB.

    Examples:
        >>> prototypes = Prototypes(3, per_class=False, ignore_index=-100, like=torch.zeros(()))
        >>> prototypes.values[2], prototypes.seen[2]
        (tensor([0., 0., 0.]), tensor(False))
    """

    draws = False

    def __init__(self, num_classes: int, per_class: bool, ignore_index: int, like: Tensor) -> None:
        self._classes, self._per_class, self._ignore_index = num_classes, per_class, ignore_index
        wide = torch.promote_types(like.dtype, torch.float32)
        size = num_classes**2 * wide.itemsize
        if size > MEMORY_LIMIT:
            raise ValueError(
                f"num_classes={num_classes}: a prototype of {num_classes} numbers for each class would take "
                f"{size / 2**30:.1f} GiB, more than the {MEMORY_LIMIT / 2**30:g} GiB that DCPOptimizer allows; take "
                "DCLOptimizer, which keeps no table of classes"
            )
        # One row more, for ignored labels: it stays zero and unseen.
        self._values = torch.zeros(num_classes + 1, num_classes, dtype=wide, device=like.device)
        self._seen = torch.zeros(num_classes + 1, dtype=torch.bool, device=like.device)
        self._observed: list[Departures] = []  # since the last step
        self._alpha = 0.0
        self._all_labelled = False  # of the last labels, as far as known without synchronising a device
        self._shares_checked = False  # whether soft labels were looked at

    @property
    def seen(self) -> Tensor:
        """Which classes have a prototype, (K,) bool."""
        return self._seen[:-1]

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero for a class that no step has seen."""
        return self._values[:-1].clone()

    # ---- the penalty ---------------------------------------------------------------------------------------------

    def penalty(self, forward: Forward, distance: Distance) -> tuple[Tensor, Tensor]:
        given = forward.criterion_targets if forward.targets is None else forward.targets
        if given is None:
            raise RuntimeError(
                "a training forward reached its backward without labels: hand the loss module over as criterion=, "
                "name the model's keyword with them as targets=, or call set_targets(labels) right before the forward"
            )
        membership, self._all_labelled = read_membership(
            given, forward, self._classes, self._ignore_index, look=not self._shares_checked
        )
        self._move_to(forward.logits)
        z = forward.logits.to(self._values.dtype)
        self._shares_checked |= membership.ndim == 2
        forward.targets = membership
        if self._per_class:
            return self._penalty_per_class(z, membership, distance)
        forecast, known = self._forecast(membership)
        if membership.ndim == 1:
            forward.forecast = forecast  # observe needs the same rows
        value, gradient = _penalty_of_some(z, forecast, known, distance)
        if self._all_labelled or membership.ndim == 2:
            return value, gradient
        share = len(z) / (membership < self._classes).sum().clamp(min=1)  # the mean is over the labelled rows
        return value * share, gradient * share

    def _forecast(self, membership: Tensor) -> tuple[Tensor, Tensor]:
        """Forecast rows, and say which rows have a forecast."""
        if membership.ndim == 1:
            return self._values.index_select(0, membership), self._seen.index_select(0, membership)
        classes, shares = self._columns(membership)
        known = ~((shares > 0) & ~self._seen.index_select(0, classes)).any(1)
        return shares @ self._values.index_select(0, classes), known

    def _columns(self, membership: Tensor) -> tuple[Tensor, Tensor]:
        """The classes that soft labels are about, (M,), and each row's shares in them, (N, M).

        Those that any row has a share in, on the CPU; all on an accelerator, which to look would synchronise.
        """
        shares = membership.to(self._values.dtype)
        if shares.device.type != "cpu":
            return torch.arange(self._classes, device=shares.device), shares
        classes = (shares != 0).any(0).nonzero().flatten()
        return classes, shares.index_select(1, classes)

    def _penalty_per_class(self, z: Tensor, membership: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
        if membership.ndim == 2:
            raise TypeError("reduction='per_class' needs hard labels; soft labels belong to several classes at once")
        rows = self._seen.index_select(0, membership).nonzero().flatten()
        if not len(rows):
            return z.new_zeros(()), torch.zeros_like(z)
        rows = rows[membership[rows].argsort(stable=True)]
        classes = membership[rows]
        sizes = classes.unique_consecutive(return_counts=True)[1].tolist()

        def summed(z: Tensor, forecast: Tensor) -> Tensor:
            parts = zip(z.split(sizes), forecast.split(sizes), strict=True)
            return torch.stack([distance(*part) for part in parts]).sum()

        forecast = self._values.index_select(0, classes)
        value, gradient = functional.value_and_gradient(summed, z[rows], forecast)
        return value, torch.zeros_like(z).index_copy_(0, rows, gradient)

    # ---- learning ------------------------------------------------------------------------------------------------

    def observe(self, forward: Forward, distance: Distance, alpha: float, scale: Scale) -> None:
        assert forward.targets is not None
        soft = forward.targets.ndim == 2
        self._observed.append(self._soft_departures(forward) if soft else self._hard_departures(forward))
        self._alpha = alpha
        if len(self._observed) > 1 and sum(len(classes) for classes, _, _ in self._observed) > self._classes:
            self._observed = [_split(self._totals())]  # so that memory does not grow with the forwards of a step

    def _hard_departures(self, forward: Forward) -> Departures:
        classes, forecast = forward.targets, forward.forecast
        assert classes is not None
        forward.forecast = None
        if forecast is None:
            forecast = self._values.index_select(0, classes)
        sums = infinities.departure(forward.logits, forecast)
        if self._all_labelled:
            return classes, sums, sums.new_ones(len(classes))
        labelled = classes < self._classes
        return classes, sums.masked_fill(~labelled[:, None], 0.0), labelled.to(sums.dtype)

    def _soft_departures(self, forward: Forward) -> Departures:
        assert forward.targets is not None
        classes, shares = self._columns(forward.targets)
        counts = shares.sum(0)
        sums = shares.T @ forward.logits.to(shares.dtype)
        return classes, sums - counts[:, None] * self._values.index_select(0, classes), counts

    def _totals(self) -> Tensor:
        """The observed sums and counts of each class, (K, K + 1)."""
        classes, sums, counts = _joined(self._observed)
        return functional.class_totals(sums, classes, counts, self._classes)

    def forget(self) -> None:
        self._observed = []

    def step(self) -> None:
        if self._observed:
            if distributed.world_size() > 1:
                totals = self._totals()
                distributed.add_up([totals])
                self._observed = [_split(totals)]
            classes, sums, counts = _joined(self._observed)
            numbers = counts.new_zeros(self._classes + 1).index_add_(0, classes, counts)
            weights = functional.departure_weights(numbers, self._seen, self._alpha).index_select(0, classes)
            self._values.index_add_(0, classes, (sums * weights[:, None]).to(self._values.dtype))
            self._seen |= numbers > 0
        self.forget()

    def _move_to(self, z: Tensor) -> None:
        """Follow the model to another device, and to a wider dtype."""
        dtype = torch.promote_types(self._values.dtype, z.dtype)
        self._values, self._seen = self._values.to(z.device, dtype), self._seen.to(z.device)

    # ---- what is saved -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies, which later steps leave alone."""
        return {"values": self.values, "seen": self.seen.clone()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Accept the form above, and that of states written before it: "table", the classes seen and their rows."""
        if "table" in state:
            named, rows = state["table"]
            like = torch.empty(len(named), device="meta")
            expected = {"classes": like, "rows": like[:, None].expand(-1, self._classes)}
            check_tensors({"classes": named, "rows": rows}, expected, "prototypes")
            if len(named) and (named.min() < 0 or named.max() >= self._classes or len(named.unique()) < len(named)):
                raise ValueError(
                    f"the state of the prototypes names classes twice or outside of 0..{self._classes - 1}"
                )
        else:
            whole = torch.empty(self._classes, self._classes, device="meta")
            check_tensors(state, {"values": whole, "seen": whole[0]}, "prototypes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        self._values.zero_()
        self._seen.zero_()
        if "table" in state:
            classes, rows = state["table"]
            classes = classes.to(self._seen.device)
            self._values[classes] = rows.to(self._values)
            self._seen[classes] = True
        else:
            self._seen[:-1] = state["seen"]
            self._values[:-1] = state["values"]


def _joined(parts: list[Departures]) -> Departures:
    """Put the departures of several forwards one after another."""
    if len(parts) == 1:
        return parts[0]
    classes, sums, counts = (list(kind) for kind in zip(*parts, strict=True))
    return torch.cat(classes), torch.cat(sums), torch.cat(counts)


def _split(totals: Tensor) -> Departures:
    """Class totals (K, K + 1) as one sum for each class."""
    return torch.arange(len(totals), device=totals.device), totals[:, :-1], totals[:, -1]


def _penalty_of_some(z: Tensor, forecast: Tensor, known: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
    """The penalty of the rows that have a forecast, averaged over all rows."""
    if known.device.type == "cpu" and known.all():
        return functional.value_and_gradient(distance, z, forecast)
    if getattr(distance, "func", None) in (functional.mse, functional.l1, functional.kl):
        # These vanish, with their gradient, where both are the same: no need to know which rows.
        z, forecast = (rows.masked_fill(~known[:, None], 0.0) for rows in (z, forecast))
        return functional.value_and_gradient(distance, z, forecast)
    if not known.any():
        return z.new_zeros(()), torch.zeros_like(z)
    share = known.sum() / len(z)
    value, gradient = functional.value_and_gradient(distance, z[known], forecast[known])
    return value * share, torch.zeros_like(z).masked_scatter_(known[:, None], gradient * share)
