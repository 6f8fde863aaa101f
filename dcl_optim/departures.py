"""How far logits lie from their classes' prototypes: kept from backward to step, and summed over the processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcl_optim import distributed, functional


@dataclass
class Departures:
    r"""Sums of :math:`z_i - p^{y_i}`, for one class each; a class may have several.

    Attributes:
        classes: (M,) in 0..K, where K stands for "of no class".
        sums: (M, K); zeros where the class is K.
        counts: how many rows each sum is of, (M,): the total of their shares for soft labels, 0 where the class is K.
    """

    classes: Tensor
    sums: Tensor
    counts: Tensor

    def by_class(self, num_classes: int) -> Departures:
        """One sum for each of all classes."""
        return _split(functional.class_totals(self.sums, self.classes, self.counts, num_classes))

    def once_a_class(self, num_classes: int) -> Departures:
        """As many sums, of which one a class has all of it and the others are zero.

        Adding them to the classes' rows then gives the same bits in any order, as atomic additions have it. Unlike
        ``unique`` it does not synchronise a device.
        """
        own = torch.arange(len(self.classes), device=self.classes.device)
        first = own.new_full((num_classes + 1,), len(own)).scatter_reduce_(0, self.classes, own, "amin")
        first = first.index_select(0, self.classes)
        sums, counts = torch.zeros_like(self.sums), torch.zeros_like(self.counts)
        return Departures(self.classes, sums.index_add_(0, first, self.sums), counts.index_add_(0, first, self.counts))


def joined(parts: list[Departures]) -> Departures:
    """Put the departures of several forwards one after another."""
    if len(parts) == 1:
        return parts[0]
    classes, sums, counts = zip(*((part.classes, part.sums, part.counts) for part in parts), strict=True)
    return Departures(torch.cat(classes), torch.cat(sums), torch.cat(counts))


def exchanged(own: Departures, num_classes: int, few: bool) -> tuple[list[tuple[Tensor, Tensor]], Iterable[Tensor]]:
    """The departures of all processes: what each is about, and, one after another, their sums.

    Few classes are summed whole in one reduction. Of many, each process in turn hands out its own rows, so that memory
    holds one other process's at a time; unless all rows together are more than the classes.
    """
    if distributed.world_size() == 1:
        return [(own.classes, own.counts)], [own.sums]
    if not few:
        lengths = distributed.lengths(own.classes)
        if sum(lengths) <= num_classes:
            own = own.once_a_class(num_classes)
            keys = [distributed.from_each(tensor, lengths) for tensor in (own.classes, own.counts)]
            return list(zip(*keys, strict=True)), distributed.from_each(own.sums, lengths)
    totals = functional.class_totals(own.sums, own.classes, own.counts, num_classes)
    distributed.add_up([totals])
    whole = _split(totals)
    return [(whole.classes, whole.counts)], [whole.sums]


def _split(totals: Tensor) -> Departures:
    """Class totals (K, K + 1) as the departures of all classes."""
    classes = torch.arange(len(totals), device=totals.device)
    return Departures(classes, totals[:, :-1], totals[:, -1])
