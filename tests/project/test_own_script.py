"""One example as a reader would run it; tests/examples has the others."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from dcl_optim.trial import overhead
from examples import own_script

ROOT = Path(__file__).parents[2]


def execute(*arguments, folder=ROOT):
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # networks this small only lose time to a second one
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_penalty_gains():
    differences = [own_script.train("auto", seed) - own_script.train(0, seed) for seed in range(4)]
    assert mean(differences) > 2 * stdev(differences) / 4**0.5


def test_its_overhead_can_be_measured():
    assert len(overhead(*own_script.make(), seconds=0.05).rows) == 5


def test_without_its_new_lines_it_is_plain_training():
    plain = (ROOT / "examples" / "own_script.py").read_text(encoding="utf-8")
    for new in ("    optimizer = DCPOptimizer(optimizer, model, weight=weight)\n", " + optimizer.penalty(z, Y[rows])"):
        assert new in plain
        plain = plain.replace(new, "")
    script = {"__name__": "plain"}
    exec(plain, script)
    assert script["train"](0, seed=1) == own_script.train(0, seed=1)
