"""The default type of the tests that compute by hand."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def double():
    """Everything that is computed by hand, is in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
