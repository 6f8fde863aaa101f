"""Memory that stays with the process, as a CUDA allocator keeps it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Of mallopt(3), with the values that glibc begins with.
TRIM_THRESHOLD, MMAP_MAX = (-1, 128 * 1024), (-4, 65536)


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Have the C library keep what is freed; yields whether it does.

    It gives blocks of megabytes back to the system, which hands them out again page by page: at ten million parameters
    20,000 page faults a step, whose time on a virtual machine varies by more than all that is measured.
    """
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(library, "mallopt"):  # musl has none
        yield False
        return
    try:
        yield all([library.mallopt(MMAP_MAX[0], 0) == 1, library.mallopt(TRIM_THRESHOLD[0], -1) == 1])
    finally:
        for name, value in (MMAP_MAX, TRIM_THRESHOLD):
            library.mallopt(name, value)
        library.malloc_trim(0)
