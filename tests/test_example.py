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


def test_minimal_and_its_one_line(tmp_path: Path) -> None:
    with_line = float(execute("-m", "examples.minimal").split()[-1])
    source = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    lines = [line for line in source.splitlines() if "the one line that is new" not in line]
    assert len(lines) == len(source.splitlines()) - 1
    (tmp_path / "without.py").write_text("\n".join(lines), encoding="utf-8")
    assert with_line > float(execute(tmp_path / "without.py").split()[-1]) > 0.87
