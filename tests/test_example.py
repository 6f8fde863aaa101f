"""One example as a reader would run it; tests/examples has the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def execute(*arguments: object, folder: Path = ROOT) -> str:
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # networks this small only lose time to a second one
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_minimal() -> None:
    assert float(execute("-m", "examples.minimal").split()[-1]) > 0.95
