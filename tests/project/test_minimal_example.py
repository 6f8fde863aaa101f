"""One example as a reader would run it; tests/examples has the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from examples import minimal

ROOT = Path(__file__).parents[2]


def execute(*arguments: object, folder: Path = ROOT) -> str:
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # networks this small only lose time to a second one
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_minimal_compares_training_with_the_penalty_and_without() -> None:
    *rows, last = execute("-m", "examples.minimal").splitlines()[1:]
    without, with_penalty, differences = zip(*([float(cell) for cell in row.split()[1:]] for row in rows), strict=True)
    assert differences == pytest.approx([b - a for a, b in zip(without, with_penalty, strict=True)], abs=0.011)
    error = stdev(differences) / len(differences) ** 0.5
    assert [float(cell) for cell in re.findall(r"[\d.]+", last)] == pytest.approx([mean(differences), error], abs=0.011)
    assert (len(rows), mean(differences) > 2 * error) == (5, True)


def test_minimal_without_its_new_lines_is_plain_training() -> None:
    source = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    plain = source.replace("DCPOptimizer(base, model, weight=weight)", "base").replace(" + optimizer.penalty(z, y)", "")
    script: dict[str, Any] = {"__name__": "plain"}
    exec(plain, script)
    assert "penalty" not in script["train"].__code__.co_names
    assert script["train"](0, seed=1) == minimal.train(0, seed=1)
