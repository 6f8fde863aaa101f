"""The rows of a batch that the companion sees, cut out of what the model was called with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dcl_optim.companion.replay import Arguments
from dcl_optim.progress import Forward, are_close
from dcl_optim.pytorch.internals import warn_once

HALF = 0.5
FEWEST = 2  # of which batch norm can take statistics
ROUNDING = 0.03  # of kernels for batches of another size, as a share of the largest logit; half precision needs most
NOT_CUT = (
    "companion_fraction has no effect on a batch: the companion gets all rows, and a step takes as long as with "
    "companion_fraction=1, about twice as long as plain training. No tensor that the model is called with has as many "
    "rows as the logits, or the companion's logits of some rows alone (in evaluation mode) are not those that it has "
    "for them in the whole batch.\n  Usual reasons: the batch is not in dimension 0 (time first), a list of images, a "
    "graph, packed sequences, an argument with as many rows as the batch that belongs to no row (a mask), layers that "
    "mix rows in evaluation too.\n  Fix: call the model with the batch in dimension 0 of its tensors; or leave out "
    "companion_fraction"
)


Call = Callable[[Arguments], Tensor]


class Rows:
    """Draws the rows of each batch, where a network's logits of these do not depend on the others.

    Whether they do is tried: once for each choice of arguments that have as many rows as the logits.

    Args:
        fraction: the share of the rows that are drawn; None for half of them, without a warning where that cannot be.

    Attributes:
        generator: of the draws of this step, which depend on its seed alone: a resumed run draws as the uninterrupted
            one. None before the first.
    """

    def __init__(self, fraction: float | None) -> None:
        self._fraction = fraction or HALF
        self._is_given = fraction is not None
        self._can_cut: dict[tuple[Any, ...], bool] = {}
        self._said: set[str] = set()
        self.generator: torch.Generator | None = None

    def draw(
        self, forward: Forward, arguments: Arguments, network: nn.Module, call: Call, seed: int
    ) -> tuple[Tensor | None, Arguments]:
        """Draw the numbers of rows, and cut them out of the arguments; None, and these as they are, for all.

        Rows are drawn, and not taken in a fixed pattern, since loaders sort by class or length, or repeat patterns.

        Args:
            forward: the model's forward pass of the whole batch.
            arguments: of that.
            network: the network.
            call: gives its logits for arguments.
            seed: of the first draw of a step; further ones go on from there.
        """
        length = forward.shape[0]
        number = max(math.ceil(self._fraction * length), FEWEST)
        if number >= length:
            return None, arguments
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(length, generator=self.generator, device="cpu")[:number]
        rows = drawn.to(forward.rows.device, non_blocking=True)
        is_cut = [
            isinstance(leaf, Tensor) and not leaf.is_nested and leaf.shape[:1] == (length,) for leaf in arguments.leaves
        ]
        case = (*arguments.names, *is_cut)
        if case not in self._can_cut:
            with torch.no_grad():
                self._can_cut[case] = any(is_cut) and _is_same_by_rows(arguments, is_cut, network, call, rows, length)
        if self._can_cut[case]:
            return rows, cut(arguments, is_cut, rows)
        if self._is_given:
            warn_once(self._said, NOT_CUT)
        return None, arguments


def cut(arguments: Arguments, is_cut: list[bool], rows: Tensor) -> Arguments:
    """Take rows of some leaves.

    Examples:
        >>> arguments = Arguments([torch.arange(6).view(3, 2), torch.ones(2)], None, (2,))
        >>> cut(arguments, [True, False], torch.tensor([2, 0])).leaves
        [tensor([[4, 5],
                [0, 1]]), tensor([1., 1.])]
    """
    leaves = [
        leaf.index_select(0, rows.to(leaf.device)) if has_rows else leaf
        for leaf, has_rows in zip(arguments.leaves, is_cut, strict=True)
    ]
    return Arguments(leaves, arguments.structure, arguments.names)


def _is_same_by_rows(
    arguments: Arguments, is_cut: list[bool], network: nn.Module, call: Call, rows: Tensor, length: int
) -> bool:
    """Whether the logits of rows in a part of the batch are those in the whole batch, in evaluation mode.

    First the other rows are replaced by copies of these: a graph whose edges leave the part is then no error of an
    index, which would end a process with a GPU.
    """
    repeated = rows.repeat(length // len(rows) + 1)[:length]
    training = [layer for layer in network.modules() if layer.training]
    try:
        for layer in training:
            layer.training = False  # not by eval(), which some layers merge their weights in
        expected = call(arguments.copied()).index_select(0, rows)
        for chosen in (repeated, rows):
            found = call(cut(arguments.copied(), is_cut, chosen))
            if len(found) != len(chosen) or not are_close(expected, found[: len(rows)], ROUNDING):
                return False
    except Exception:  # whatever a model raises for a batch that it was not made for
        return False
    finally:
        for layer in training:
            layer.training = True
    return True
