"""Tests on the fake accelerator: a process of its own, since a device that is registered stays, and its answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fake_device

ROOT = Path(__file__).parents[2]
needs_device = pytest.mark.skipif(not fake_device.available(), reason="this torch has no devices in Python")


def python(*words):
    """What Python prints in a process of its own."""
    line = [sys.executable, "-W", "error", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def answers(module):
    """Run a test module as a script and read the JSON that it prints last."""
    return json.loads(python("-m", module).splitlines()[-1])
