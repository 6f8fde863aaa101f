"""The packages of examples as commands: a list, and one line where a launcher is missing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.helpers import PATIENCE


def execute(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


@pytest.mark.parametrize(
    ("package", "some"),
    [
        ("examples", ("own_script", "image_classification", "research")),
        ("examples.research.applications", ("fine_tuning", "masked_autoencoder", "text")),
    ],
)
def test_a_package_lists_its_commands(package: str, some: tuple[str, ...]) -> None:
    done = execute(package)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(rf"^python -m {package}\.(\w+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(some) <= found.keys()
    assert not {"loop", "comparison", "__main__"} & found.keys()


def test_without_torchrun_the_command_is_said() -> None:
    done = execute("examples.distributed")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "torchrun --nproc-per-node 2 -m examples.distributed" in done.stderr
