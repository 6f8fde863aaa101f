"""One example as a reader would run it; tests/examples has the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def execute(name: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", EXAMPLES / name, *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # networks this small only lose time to a second one
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_minimal() -> None:
    assert float(execute("minimal.py").split()[-1]) > 0.95
