"""The packages of examples as commands: a list, and one line where a launcher is missing."""

import re
import subprocess
import sys

from tests.helpers import PATIENCE


def execute(*command):
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def test_the_package_lists_its_commands():
    done = execute("examples")
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^python -m examples\.(\w+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert {"own_script", "image_classification", "research"} <= found.keys()
    assert "__main__" not in found


def test_without_torchrun_the_command_is_said():
    done = execute("examples.distributed")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "torchrun --nproc-per-node 2 -m examples.distributed" in done.stderr
