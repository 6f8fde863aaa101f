"""Lightning's DistributedDataParallel: two processes with half a batch each are one process with the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import assert_same, mlp
from tests.integrations.lightning_modules import by_hand, differ

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.integrations.lightning_processes", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("wrapped", ["net", "self"])
def test_two_processes_are_one_with_the_whole_batch(wrapped, folder):
    first, second = (torch.load(folder / f"{wrapped}-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    net = mlp()
    expected = by_hand("dcl", net)
    assert_same(first["net"], net.state_dict(), rtol=1e-9, atol=1e-12)
    companion = first["optimizer"]["dcl_optim.DCLOptimizer"]["forecaster"]["model"]
    companion = {name.removeprefix("net."): value for name, value in companion.items()}
    assert_same(companion, expected.companion.state_dict(), rtol=1e-9, atol=1e-12)
    assert differ(expected.companion, net)
