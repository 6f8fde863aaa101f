"""The thread count of ``pytest benchmarks``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

THREADS = 2


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
