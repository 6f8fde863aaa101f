"""One example as a reader would run it; tests/examples has the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MINIMAL = Path(__file__).parent.parent / "examples" / "minimal.py"


def test_minimal() -> None:
    command = [sys.executable, "-W", "error", MINIMAL]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # networks this small only lose time to a second one
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.95
