"""The bytes of tensors, and what a device has handed out at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["peak_of", "readable", "tensor_bytes"]


def tensor_bytes(tree: Any) -> int:
    """Count the bytes of the tensors in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(tensor_bytes, tree.values()))
    return sum(map(tensor_bytes, tree)) if isinstance(tree, (list, tuple)) else 0


def peak_of(work: Callable[[], object], device: torch.device) -> int | None:
    """Do some work, and return the bytes of its device that it took beyond what was taken before.

    None if the device does not count them, as the CPU does not.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        work()
        return None
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    work()
    return int(module.max_memory_allocated(device)) - int(before)


def readable(count: int) -> str:
    """Write a number of bytes in KiB or MiB.

    Examples:
        >>> readable(2048), readable(3 * 2**20)
        ('2.0 KiB', '3.00 MiB')
    """
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
