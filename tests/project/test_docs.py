"""The pages: their code runs, and the files that they name exist."""

import ast
import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import dcl_optim
import dcl_optim.trial

ROOT = Path(__file__).parents[2]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


CODE = re.compile(r"^(?:```python|<!-- python)\n(.*?)^(?:```|-->)", re.M | re.S)
LIBRARIES = re.compile(r"^(?:from|import) (?:timm|skorch|ignite|pytorch_optimizer)\b", re.M)


def blocks():
    """Code on the pages, and a page as a whole if it has code that no reader sees: names that the others take from it.

    docs/logging.md has its own tests, and so have dcl_optim/reference.py, of which a page has parts, and recipes in
    several files, which begin with the name of the file.
    """
    found = {page.stem: page.read_text() for page in PAGES if page.stem != "logging"}
    for page, text in found.items():
        codes = [code for code in CODE.findall(text) if not re.search(r"^>>> |\A# \w+\.py\n|\A--8<--", code, re.M)]
        for code in ["\n".join(codes)] if "<!-- python" in text else codes:
            marks = [pytest.mark.integration] if LIBRARIES.search(code) else []
            yield pytest.param(code, id=page, marks=marks)


def run(code, script):
    """Run code; where a comment with a value follows an expression, that is its value."""
    lines = code.splitlines()
    for node in ast.parse(code).body:
        source = ast.get_source_segment(code, node)
        if isinstance(node, ast.Expr):
            value = eval(source, script)
            said = lines[node.end_lineno].removeprefix("# ") if node.end_lineno < len(lines) else ""
            with contextlib.suppress(ValueError, SyntaxError):  # other lines than a comment with a value
                if lines[node.end_lineno : node.end_lineno + 1] == [f"# {said}"]:
                    assert value == ast.literal_eval(said)
        else:
            exec(compile(ast.Module([node], []), "page", "exec"), script)


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
        "loader": [(torch.randn(8, 4), torch.arange(8) % 3)],
        "network": lambda: nn.Linear(4, 3),
        "validation": (torch.randn(8, 4), torch.arange(8) % 3),
        "x": torch.randn(60, 4),
        "y": torch.arange(60) % 3,
        "accelerator": SimpleNamespace(prepare=lambda *given: given),
    }


@pytest.mark.parametrize("block", list(blocks()))
def test_code_on_the_pages_runs(block, monkeypatch):
    monkeypatch.setitem(dcl_optim.trial.overhead.__kwdefaults__, "seconds", 0.05)
    run(block, what_a_script_has())


@pytest.mark.parametrize("line", ["1 + 1\n# 3", "pair = 1, 2\npair\n# (1, 3)"])
def test_a_wrong_value_on_a_page_is_noticed(line):
    with pytest.raises(AssertionError):
        run(line, {})


WANTED = "class weights, imbalanced, overhead, fp16, early stopping, noisy, segmentation, mixup, resume, checkpoint"


@pytest.mark.parametrize("words", WANTED.split(", "))
def test_what_people_search_for_is_on_a_page(words):
    """The search of the site finds the words of its pages."""
    pages = [page.read_text().lower() for page in (ROOT / "docs").glob("*.md")]
    assert [page for page in pages if words in page]


def test_links_lead_to_headings_that_a_git_host_knows_too():
    """The anchors of what mkdocstrings makes are on the site alone."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if re.search(r"\.md#dcl_optim[._]", page.read_text())] == []


def test_code_to_copy_has_no_prompts():
    assert [page.name for page in PAGES if re.search(r"^>>> ", page.read_text(), re.M)] == []


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
