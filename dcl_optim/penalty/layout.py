"""Logits as rows: one row is one prediction (an image, a pixel, a token), with the classes last; their difference."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = 900.0  # how far the logit of a masked class lies below the largest of its row, at least


def to_rows(tensor: Tensor, class_dim: int = 1) -> Tensor:
    """Flatten logits of any shape to rows, the classes last: (batch, K, ...) becomes (N, K).

    Args:
        tensor: logits; one dimension is N rows of a single value.
        class_dim: the dimension that holds the classes. Default 1, as in ``F.cross_entropy``.

    Examples:
        >>> to_rows(torch.zeros(2, 10, 4, 4)).shape
        torch.Size([32, 10])
    """
    if tensor.ndim == 2 and class_dim == 1:
        return tensor
    if tensor.ndim < 2:
        return tensor.reshape(-1, 1)
    return tensor.movedim(class_dim, -1).reshape(-1, tensor.shape[class_dim])


def from_rows(rows: Tensor, shape: tuple[int, ...], class_dim: int = 1) -> Tensor:
    """Undo :func:`to_rows`.

    Args:
        rows, shape: (N, K), and the shape to give back.
        class_dim: the dimension that holds the classes.

    Examples:
        >>> from_rows(torch.zeros(32, 10), (2, 10, 4, 4)).shape
        torch.Size([2, 10, 4, 4])
    """
    if len(shape) == 2 and class_dim == 1:
        return rows
    if len(shape) < 2:
        return rows.reshape(shape)
    return rows.reshape(*shape[:class_dim], *shape[class_dim + 1 :], shape[class_dim]).movedim(-1, class_dim)


def copy_of_rows(logits: Tensor, class_dim: int) -> Tensor:
    """Copy logits as rows, which lie one after the other in memory."""
    classes_last = logits.movedim(class_dim, -1) if logits.ndim > 1 else logits.unsqueeze(1)
    return classes_last.clone(memory_format=torch.contiguous_format).flatten(0, -2)


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 or wider.

    Args:
        tensor: of floating point.

    Examples:
        >>> wide(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


class Masks:
    """Leaves masked classes out of logits, once a batch has shown one.

    Scripts set such logits to minus infinity, -10,000 or -1,000, or add that. Unlike a number for all rows, the
    distance to the largest leaves logits alone that are low as a whole, such as squared distances.

    Attributes:
        are_there: whether a batch has.

    Examples:
        >>> masks = Masks()
        >>> masks.look_for(torch.tensor([[2.0, -1000.0]]))
        >>> masks.left_out(torch.tensor([[2.0, -998.0], [-1000.0, -900.0]]))
        tensor([[    2.,   -inf],
                [-1000.,  -900.]])
    """

    are_there = False

    def look_for(self, logits: Tensor) -> None:
        """Look whether logits have some. Synchronizes."""
        if logits.numel() and not self.are_there:
            self.are_there = logits.detach().amin().item() <= -MASKED

    def left_out(self, rows: Tensor) -> Tensor:
        """Set those of rows to minus infinity."""
        return rows.masked_fill(rows <= rows.amax(1, keepdim=True) - MASKED, -torch.inf)


def difference(z: Tensor, c: Tensor) -> Tensor:
    """Subtract c from z in float32 or wider; 0 where that is not finite.

    Examples:
        >>> difference(torch.tensor([1.0, -torch.inf]), torch.tensor([3.0, -torch.inf]))
        tensor([-2.,  0.])
    """
    subtracted = z - c if z.dtype.itemsize >= 4 else z.float().sub_(c)
    return subtracted.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
