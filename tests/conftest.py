"""One thread for all tests: the tensors are tiny, and threads only fight each other on a busy machine."""

import signal
from pathlib import Path

import pytest
import torch

from tests.helpers import on_two_ranks

torch.set_num_threads(1)
# What a shell starts in the background ignores Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def threads_stay():
    """Another number would change the last bits of what later tests compare with other processes."""
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory) -> Path:
    """What the module's ``worker`` has written on each of two ranks, all of it in one go: starting them takes long."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    on_two_ranks(request.module.worker, folder)
    return folder
