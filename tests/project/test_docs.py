"""The pages: their code runs, and the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import dcl_optim

ROOT = Path(__file__).parents[2]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks():
    """Code on the pages that is no session with its output, which doctests run.

    docs/logging.md has its own tests, and so have recipes in several files, which begin with the name of the file.
    """
    found = {page.stem: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in PAGES}
    del found["logging"]
    return [
        pytest.param(block, id=page)
        for page in found
        for block in found[page]
        if not re.search(r">>> |\A# \w+\.py\n", block)
    ]


def what_a_script_has():
    """Names that the pages take for granted."""
    model = nn.Linear(4, 3)
    return vars(dcl_optim) | {
        "torch": torch,
        "nn": nn,
        "SGD": torch.optim.SGD,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "build": lambda: nn.Linear(4, 3),
        "shard": lambda module: module,
        "DistributedDataParallel": lambda module: module,
        "Trainer": MagicMock,
        "Learner": MagicMock,
        "dls": None,
        "arguments": None,
        "num_classes": 3,
        "data": [],
        "loader": [],
        "accelerator": SimpleNamespace(prepare=lambda *given: given),
    }


@pytest.mark.parametrize("block", blocks())
def test_code_on_the_pages_runs(block):
    exec(block, what_a_script_has())


def test_files_named_on_the_pages_exist():
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"`((?:\.ci|docs|examples|tests)/[^`*{]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def diffs(whole):
    """Scripts on the pages that show which lines are new: whole ones, or the lines with the loss."""
    found = {page.stem: re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.M | re.S) for page in PAGES}
    return [pytest.param(block, id=page) for page in found for block in found[page] if whole == ("import" in block)]


@pytest.mark.parametrize("block", diffs(whole=False))
@pytest.mark.parametrize("left_out", ["+", "-"])
def test_the_lines_with_the_loss_run_with_the_term_and_without(block, left_out):
    model = nn.Linear(4, 3)
    optimizer = dcl_optim.DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    script = {"model": model, "optimizer": optimizer, "x": torch.randn(8, 4), "y": torch.arange(8) % 3}
    lines = [line[2:] for line in block.splitlines() if not line.startswith(left_out)]
    exec("\n".join(lines), script | {"criterion": nn.functional.multi_margin_loss}, script)
    assert (script["loss"].grad_fn.name() == "AddBackward0") == (left_out == "-")


@pytest.mark.parametrize("block", diffs(whole=True))
@pytest.mark.parametrize("left_out", ["+", "-"])
def test_scripts_run_with_the_new_lines_and_without(block, left_out):
    lines = [line[2:] for line in block.splitlines() if not line.startswith(left_out)]
    script = {"loader": [(torch.randn(8, 1, 28, 28), torch.arange(8))]}
    exec("\n".join(lines), script)
    wrapped = isinstance(script["optimizer"], dcl_optim.DCPOptimizer)
    assert wrapped == (left_out == "-")
    if wrapped:
        assert script["optimizer"].logs()["step"] > 0
