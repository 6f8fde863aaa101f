"""A missing package ends each script in one line that says what to install."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

from examples.helpers.extras import EXTRAS, explain
from tests.test_example import ROOT

NEEDS = {
    "minimal": "sklearn",
    "distributed": "sklearn",
    "mixed_precision": "sklearn",
    "image_classification": "tqdm",
    "lightning_module": "lightning",
    "transformers_lora": "peft",
    "paper": "tqdm",
    "applications.text": "tqdm",
    "applications.augmentations": "torchvision",
    "applications.masked_autoencoder": "timm",
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_explained(name, monkeypatch):
    for module in [module for module in sys.modules if module.startswith("examples.")]:
        monkeypatch.delitem(sys.modules, module)
    for module in [module for module in sys.modules if module.partition(".")[0] == NEEDS[name]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    with pytest.raises(ModuleNotFoundError) as raised:
        runpy.run_module(f"examples.{name}", run_name="__main__")
    assert explain(raised.value).endswith(f"; in the repository: pip install -e '.[{EXTRAS[NEEDS[name]]}]'")


def test_the_extras_are_those_that_bring_the_packages():
    project = (ROOT / "pyproject.toml").read_text()
    called = {"sklearn": "scikit-learn", "PIL": "pillow", "scipy": "scikit-learn"}  # which needs scipy
    for package, extra in EXTRAS.items():
        needs = re.search(rf"^{extra.split(',')[-1]} = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
        assert f'"{called.get(package, package).lower()}' in needs[1]


def test_other_errors_are_left_alone():
    for error in (ModuleNotFoundError("of ours", name="examples.none"), ImportError("old", name="peft"), ValueError()):
        assert explain(error) is None


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("raise ModuleNotFoundError('none', name='sklearn')", r"error: none; .*pip install -e '\.\[demo\]'\n"),
        ("raise ValueError('none')", r"Traceback(.|\n)*ValueError: none\n"),
    ],
    ids=["missing", "broken"],
)
def test_the_command_ends_in_that_line(content, line, tmp_path):
    (tmp_path / "sklearn.py").write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "examples.minimal"], cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(line, done.stderr)
