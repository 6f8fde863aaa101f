"""A missing package ends each script in one line that says what to install."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest

from examples.research.extras import GROUPS, explain
from tests.project.test_own_script import ROOT

NEEDS = {
    "idea": "sklearn",
    "__main__": "tqdm",
    "applications.fine_tuning": "tqdm",
}


def without(package, tmp_path, content):
    """Run a script where a package's import runs this instead."""
    (tmp_path / f"{package}.py").write_text(content)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return functools.partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_explained_in_one_line(name, tmp_path):
    package = NEEDS[name]
    run = without(package, tmp_path, f"raise ModuleNotFoundError('none', name={package!r})")
    done = run([sys.executable, "-m", f"examples.research.{name}"])
    group = GROUPS[package]
    line = f"error: none; in the repository: pip install -e '.[demo]'{f' --group {group}' if group else ''}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def requirements(name):
    """What an extra or a group of pyproject.toml names, with what the extras in it name."""
    project = (ROOT / "pyproject.toml").read_text()
    text = re.search(rf"^{name} = \[(.*?)\](?: #.*)?$", project, re.MULTILINE | re.DOTALL)[1]
    return text + "".join(map(requirements, re.findall(r"dcl-optim\[(\w+)\]", text)))


def test_the_extra_and_the_groups_are_those_that_bring_the_packages():
    called = {"sklearn": "scikit-learn", "PIL": "pillow", "scipy": "scikit-learn"}  # which needs scipy
    for package, group in GROUPS.items():
        assert f'"{called.get(package, package).lower()}' in requirements(group or "demo")


def test_other_errors_are_left_alone():
    for error in (ModuleNotFoundError("of ours", name="examples.none"), ImportError("old", name="timm"), ValueError()):
        assert explain(error) is None


def test_another_error_has_its_traceback(tmp_path):
    done = without("sklearn", tmp_path, "raise ValueError('none')")([sys.executable, "-m", "examples.research.idea"])
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Traceback(.|\n)*ValueError: none\n", done.stderr)
