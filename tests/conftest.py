"""One thread for all tests: the tensors are tiny, and threads only fight each other on a busy machine."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def threads_stay():
    """Another number would change the last bits of what later tests compare with other processes."""
    yield
    assert torch.get_num_threads() == 1
