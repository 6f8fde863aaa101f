"""A table of vectors, one a class, that takes room for the classes that have one."""

from __future__ import annotations

import torch
from torch import Tensor

# Up to here a table has room for all classes from the start, states hold it whole, and processes add it up whole.
# Which of the two forms it is depends on the number of classes alone, so that all processes choose alike. With hard
# labels both cost the same there; above, soft labels are faster by the columns that have a share.
FEW_CLASSES = 256
# Above, an accelerator's table still has room for all from the start while that fits in here: to grow, a table has to
# look at how many classes are new, which would synchronise the device at each step.
AFFORDABLE_BYTES = 2**30


class Table:
    """A row for each class that has one; all others share a row of zeros.

    Class K, one above the last, stands for "of no class" and never gets a row.

    Args:
        num_classes: K, the number of classes and the length of a row.
        like: a tensor whose dtype and device the rows take.

    Attributes:
        num_classes: K.
        have_row: which classes have one, (K + 1,) bool.
        complete: whether every class has a row, as far as that is known without synchronising a device.

    Examples:
        >>> table = Table(3, like=torch.zeros(()))
        >>> table.admit(torch.tensor([0.0, 2.0, 0.0, 0.0]))
        >>> table.add(torch.tensor([1, 1]), torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]))
        >>> table.look_up(torch.tensor([0, 1]))
        tensor([[0., 0., 0.],
                [2., 3., 4.]])
        >>> table.seen
        tensor([False,  True, False])
    """

    def __init__(self, num_classes: int, like: Tensor) -> None:
        self.num_classes = num_classes
        self.complete = False
        self.have_row = torch.zeros(num_classes + 1, dtype=torch.bool, device=like.device)
        on_demand = num_classes > FEW_CLASSES
        if on_demand and like.device.type != "cpu":
            on_demand = (num_classes + 1) * num_classes * like.element_size() > AFFORDABLE_BYTES
        # Where each class's row is; None if at the class's own number. The row of zeros is the first one, or the last.
        self._slots = torch.zeros(num_classes + 1, dtype=torch.int64, device=like.device) if on_demand else None
        self._used = 1
        self._rows = like.new_zeros(1 if on_demand else num_classes + 1, num_classes)

    @property
    def few(self) -> bool:
        """Whether the classes are so few that whole tables are kept, saved and summed."""
        return self.num_classes <= FEW_CLASSES

    @property
    def seen(self) -> Tensor:
        """Which classes have a row, (K,) bool."""
        return self.have_row[:-1]

    @property
    def dtype(self) -> torch.dtype:
        """The rows' dtype."""
        return self._rows.dtype

    @property
    def device(self) -> torch.device:
        """The rows' device."""
        return self._rows.device

    @property
    def nbytes(self) -> int:
        """Memory that the rows take, with the room that they may grow into."""
        return self._rows.numel() * self._rows.element_size()

    def look_up(self, classes: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the rows of classes (M,) in 0..K: (M, K), zeros for those that have none."""
        return torch.index_select(self._rows, 0, self._find(classes), out=out)

    def have_rows(self, classes: Tensor) -> Tensor:
        """Say which of the classes (M,) have a row."""
        return self.have_row.index_select(0, classes)

    def add(self, classes: Tensor, moves: Tensor) -> None:
        """Add moves (M, K) to the rows of classes (M,), in place; those without a row must have moves of zero."""
        self._rows.index_add_(0, self._find(classes), moves)

    def admit(self, counts: Tensor) -> None:
        """Give a row of zeros to each class whose count, in (K + 1,), is positive and that has none."""
        new = (counts > 0) & ~self.have_row
        new[-1] = False
        if self._slots is not None:
            classes = new.nonzero().flatten()
            self._make_room(len(classes))
            self._slots[classes] = torch.arange(self._used, self._used + len(classes), device=self.device)
            self._rows[self._used : self._used + len(classes)] = 0.0
            self._used += len(classes)
        self.have_row |= new
        self.complete = self.device.type == "cpu" and bool(self.seen.all())

    def _make_room(self, more: int) -> None:
        if self._used + more > len(self._rows):
            capacity = min(max(self._used + more, 2 * len(self._rows)), self.num_classes + 1)
            rows = self._rows.new_empty(capacity, self.num_classes)
            rows[: self._used] = self._rows[: self._used]
            self._rows = rows

    def _find(self, classes: Tensor) -> Tensor:
        return classes if self._slots is None else self._slots.index_select(0, classes)

    def to(self, like: Tensor) -> Table:
        """A table of the same rows in another tensor's dtype and on its device."""
        other = Table(self.num_classes, like)
        other.put(*self.contents())
        return other

    def contents(self) -> tuple[Tensor, Tensor]:
        """The classes that have a row, (S,) in ascending order, and copies of their rows, (S, K). Synchronises."""
        classes = self.seen.nonzero().flatten()
        return classes, self.look_up(classes)

    def put(self, classes: Tensor, rows: Tensor) -> None:
        """Take rows (S, K) over for classes (S,), each of them named once."""
        classes = classes.to(self.device)
        counts = torch.zeros_like(self.have_row).index_fill_(0, classes, True)
        self.admit(counts)
        self._rows[self._find(classes)] = rows.to(self._rows)
