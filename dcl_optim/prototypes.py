"""Class prototypes: one vector of logits per class in place of a second network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcl_optim import departures, distributed, functional
from dcl_optim.departures import Departures
from dcl_optim.forecaster import Forecaster, Forward, Scale, check_tensors
from dcl_optim.functional import Distance, Reduction
from dcl_optim.membership import read_membership
from dcl_optim.table import AFFORDABLE_BYTES, Table

REDUCTIONS = (*functional.REDUCTIONS, "per_class")
# Rows that are kept from backward to step before they are summed by class, or twice the classes if that is more.
ROWS_KEPT = 4096


class Prototypes(Forecaster):
    r"""The prototypes :math:`p^k` of Deep Companion Prototype (the paper's appendix, Equations 5 and 6).

    Forecast: the prototype of each row's class; with soft labels the mixture :math:`\sum_k t_{ik}\,p^k`, and rows
    weigh :math:`t_{ik}` in class k's mean, which for one-hot labels is the same thing. Rows of an ignored label, and
    of a class that no step has seen, have no forecast and give no penalty.

    A step reads and writes the prototypes of its batch's classes only. Above ``FEW_CLASSES`` (:mod:`dcl_optim.table`)
    memory, states and what processes exchange grow with the classes seen, not with K squared.

    Args:
        num_classes: K, at least 1; the logits must have as many.
        per_class: average the penalty within each class and sum over the classes (one reading of Equation 5)
            instead of averaging over the batch.
        ignore_index: the label of rows to leave out.
        like: a tensor whose device, and dtype at float32 or wider, the prototypes take.

    Examples:
        >>> prototypes = Prototypes(3, per_class=False, ignore_index=-100, like=torch.zeros(()))
        >>> prototypes.of(torch.tensor([2]))
        tensor([[0., 0., 0.]])
    """

    draws = False

    def __init__(self, num_classes: int, per_class: bool, ignore_index: int, like: Tensor) -> None:
        self._per_class, self._ignore_index = per_class, ignore_index
        wide = torch.promote_types(like.dtype, torch.float32)
        self._table = Table(num_classes, torch.empty(0, dtype=wide, device=like.device))
        self._observed: list[Departures] = []  # since the last step
        self._membership: Tensor | None = None  # of the rows whose penalty was asked for last
        self._departure: tuple[Tensor, Tensor] | None = None  # logits, and how far they are from their prototypes
        self._spare: Tensor | None = None  # memory of the last step's departures, for the next ones
        self._alpha = 0.0
        # As far as is known without synchronising a device: of the last labels, the last rows, all rows since the step.
        self._all_labelled = self._all_known = False
        self._all_observed_known, self._shares_checked = True, False  # the latter: whether soft labels were looked at

    # ---- what people look at -------------------------------------------------------------------------------------

    @property
    def seen(self) -> Tensor:
        """Which classes have a prototype, (K,) bool."""
        return self._table.seen

    @property
    def values(self) -> Tensor:
        """A copy of all prototypes, (K, K); zero for a class that no step has seen.

        Raises:
            RuntimeError: it would take more than 1 GiB; see :meth:`of`.
        """
        classes = self._table.num_classes
        size = classes * classes * self._table.dtype.itemsize
        if size > AFFORDABLE_BYTES:
            raise RuntimeError(
                f"the prototypes of all {classes} classes would take {size / 2**30:.0f} GiB; prototypes_of(classes) "
                "gives those of the classes that you name"
            )
        return self.of(torch.arange(classes, device=self._table.device))

    def of(self, classes: Tensor) -> Tensor:
        """Copy the prototypes of the given classes (M,): (M, K); zero for a class that no step has seen."""
        return self._table.look_up(classes)

    # ---- the penalty ---------------------------------------------------------------------------------------------

    def penalty(self, forward: Forward, distance: Distance) -> tuple[Tensor, Tensor]:
        given = forward.criterion_targets if forward.targets is None else forward.targets
        if given is None:
            raise RuntimeError(
                "a training forward reached its backward without labels: hand the loss module over as criterion=, "
                "name the model's keyword with them as targets=, or call set_targets(labels) right before the forward"
            )
        self._move_to(forward.logits)
        table = self._table
        z = forward.logits.to(table.dtype)
        membership, self._all_labelled = read_membership(
            given, forward, table.num_classes, self._ignore_index, look=not self._shares_checked
        )
        self._shares_checked |= membership.ndim == 2
        self._membership = membership
        if self._per_class:
            return self._penalty_per_class(z, membership, distance)
        squared = getattr(distance, "func", None) is functional.mse
        forecast, known = self._forecast(membership, self._take_spare(z) if squared else None)
        self._all_known = known is None
        labelled = self._count_labelled(z, membership)
        if squared:
            if membership.ndim == 1:
                self._departure = (forward.logits, forecast)
            return _squared_penalty(z, forecast, known, labelled, **distance.keywords)  # type: ignore[attr-defined]
        if known is None:
            return functional.value_and_gradient(distance, z, forecast)
        return _penalty_of_some(z, forecast, known, labelled, distance)

    def _forecast(self, membership: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Forecast rows, in memory of their own, and which rows have one; None for all."""
        if membership.ndim == 1:
            forecast = self._table.look_up(membership, out)
            if self._all_labelled and self._table.complete:
                return forecast, None
            known = self._table.have_rows(membership)
        else:
            classes, shares = self._columns(membership)
            forecast = shares @ self._table.look_up(classes)
            known = ~((shares > 0) & ~self._table.have_rows(classes)).any(1)
        looked = known.device.type == "cpu" and bool(known.all())
        return forecast, None if looked else known

    def _columns(self, membership: Tensor) -> tuple[Tensor, Tensor]:
        """The classes that soft labels are about, (M,), and each row's shares in them, (N, M)."""
        shares = membership.to(self._table.dtype)
        if self._table.few:
            return torch.arange(self._table.num_classes, device=shares.device), shares
        classes = (shares != 0).any(0).nonzero().flatten()
        return classes, shares.index_select(1, classes)

    def _count_labelled(self, z: Tensor, membership: Tensor) -> float | Tensor:
        if self._all_labelled or membership.ndim == 2:
            return max(len(z), 1)
        count = (membership < self._table.num_classes).sum(dtype=z.dtype).clamp(min=1)
        return count.item() if count.device.type == "cpu" else count

    def _take_spare(self, z: Tensor) -> Tensor | None:
        """Large tensors' memory is new to the process each time on a CPU, which costs more than writing to it."""
        spare, self._spare = self._spare, None
        fits = spare is not None and spare.shape == z.shape and spare.dtype == z.dtype
        return spare if fits and z.device.type == "cpu" else None

    def _penalty_per_class(self, z: Tensor, membership: Tensor, distance: Distance) -> tuple[Tensor, Tensor]:
        if membership.ndim == 2:
            raise TypeError("reduction='per_class' needs hard labels; soft labels belong to several classes at once")
        rows = self._table.have_rows(membership).nonzero().flatten()
        if not len(rows):
            return z.new_zeros(()), torch.zeros_like(z)
        rows = rows[membership[rows].argsort(stable=True)]
        classes = membership[rows]
        sizes = classes.unique_consecutive(return_counts=True)[1].tolist()

        def summed(z: Tensor, forecast: Tensor) -> Tensor:
            parts = zip(z.split(sizes), forecast.split(sizes), strict=True)
            return torch.stack([distance(*part) for part in parts]).sum()

        forecast = self._table.look_up(classes)
        value, gradient = functional.value_and_gradient(summed, z[rows], forecast)
        return value, torch.zeros_like(z).index_copy_(0, rows, gradient)

    # ---- learning ------------------------------------------------------------------------------------------------

    def observe(self, forward: Forward, distance: Distance, alpha: float, scale: Scale) -> None:
        membership, self._membership = self._membership, None
        assert membership is not None
        departures_of = self._soft_departures if membership.ndim == 2 else self._hard_departures
        self._observed.append(departures_of(forward.logits, membership))
        self._all_observed_known &= self._all_known
        self._departure, self._all_known = None, False
        self._alpha = alpha
        kept, classes = sum(len(part.classes) for part in self._observed), self._table.num_classes
        if kept > max(2 * classes, ROWS_KEPT):
            self._observed = [departures.joined(self._observed).by_class(classes)]

    def _hard_departures(self, logits: Tensor, classes: Tensor) -> Departures:
        if self._departure is not None and self._departure[0] is logits:
            sums = self._departure[1]
        else:
            sums = functional.difference(logits, self._table.look_up(classes))
        if self._all_labelled:
            return Departures(classes, sums, sums.new_ones(len(classes)))
        labelled = classes < self._table.num_classes
        return Departures(classes, sums.masked_fill_(~labelled[:, None], 0.0), labelled.to(sums.dtype))

    def _soft_departures(self, logits: Tensor, membership: Tensor) -> Departures:
        classes, shares = self._columns(membership)
        counts = shares.sum(0)
        sums = shares.T @ logits.to(shares.dtype)
        return Departures(classes, sums.addcmul_(counts[:, None], self._table.look_up(classes), value=-1.0), counts)

    def forget(self) -> None:
        self._observed, self._departure, self._membership, self._all_observed_known = [], None, None, True

    def step(self) -> None:
        if self._observed:
            table = self._table
            own = departures.joined(self._observed)
            keys, all_sums = departures.exchanged(own, table.num_classes, table.few)
            counts = own.sums.new_zeros(table.num_classes + 1)
            for classes, numbers in keys:
                counts.index_add_(0, classes, numbers)
            nothing_new = table.complete or (self._all_observed_known and distributed.world_size() == 1)
            weights = functional.departure_weights(counts, None if nothing_new else table.have_row, self._alpha)
            if not nothing_new:
                table.admit(counts)
            for (classes, _), sums in zip(keys, all_sums, strict=True):
                table.add(classes, sums.mul_(weights.index_select(0, classes)[:, None]))
            self._spare = own.sums if len(self._observed) == 1 and own.sums.device.type == "cpu" else None
        self.forget()

    def _move_to(self, z: Tensor) -> None:
        """Follow the model to another device, and to a wider dtype."""
        dtype = torch.promote_types(self._table.dtype, z.dtype)
        if self._table.device != z.device or self._table.dtype != dtype:
            self._table = self._table.to(torch.empty(0, dtype=dtype, device=z.device))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_spare": None}

    # ---- what is saved -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies, which later steps leave alone: few classes whole, of many those that were seen and their rows.

        The latter as a tuple, which torch.distributed.checkpoint takes for one object that need not have the same size
        when it is loaded into a fresh optimizer.
        """
        if self._table.few:
            return {"values": self.values, "seen": self.seen.clone()}
        return {"table": self._table.contents()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Accept both forms for any number of classes."""
        classes = self._table.num_classes
        if "table" in state:
            named, rows = state["table"]
            like = torch.empty(len(named), device="meta")
            expected = {"classes": like, "rows": like[:, None].expand(-1, classes)}
            check_tensors({"classes": named, "rows": rows}, expected, "prototypes")
            if len(named) and (named.min() < 0 or named.max() >= classes or len(named.unique()) < len(named)):
                raise ValueError(f"the state of the prototypes names classes twice or outside of 0..{classes - 1}")
        else:
            whole = torch.empty(classes, classes, device="meta")
            check_tensors(state, {"values": whole, "seen": whole[0]}, "prototypes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget()
        if "table" in state:
            classes, rows = state["table"]
        else:
            classes = state["seen"].nonzero().flatten()
            rows = state["values"][classes]
        self._table = Table(self._table.num_classes, torch.empty(0, dtype=self._table.dtype, device=self._table.device))
        self._table.put(classes, rows)


def _squared_penalty(
    z: Tensor, forecast: Tensor, known: Tensor | None, labelled: float | Tensor, reduction: Reduction
) -> tuple[Tensor, Tensor]:
    """The default distance. What it is taken of, which the prototypes will move by, is written over the forecast."""
    apart = functional.difference(z, forecast, out=forecast)
    pull = apart if known is None else apart.masked_fill(~known[:, None], 0.0)
    return functional.squared(pull, labelled, reduction)


def _penalty_of_some(
    z: Tensor, forecast: Tensor, known: Tensor, labelled: float | Tensor, distance: Distance
) -> tuple[Tensor, Tensor]:
    """The penalty of the rows that have a forecast, averaged over the labelled ones."""
    if getattr(distance, "func", None) in (functional.l1, functional.kl):
        # These vanish, with their gradient, where the forecast is z itself: no need to know which rows.
        share = len(z) / labelled
        value, gradient = functional.value_and_gradient(distance, z, torch.where(known[:, None], forecast, z))
        return value * share, gradient * share
    if not known.any():
        return z.new_zeros(()), torch.zeros_like(z)
    share = known.sum() / labelled
    value, gradient = functional.value_and_gradient(distance, z[known], forecast[known])
    return value * share, torch.zeros_like(z).masked_scatter_(known[:, None], gradient * share)
