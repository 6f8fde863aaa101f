"""Each example is one short file that can be copied: it imports nothing of the repository but dcl_optim."""

import ast
from pathlib import Path

import pytest

from tests.project.test_own_script import execute

FOLDER = Path(__file__).parents[2] / "examples"
# paper.py is no example to copy: it is a command of examples/research.
EXAMPLES = sorted({path.stem for path in FOLDER.glob("[!_]*.py")} - {"paper"})


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_one_short_file_that_imports_nothing_else_of_the_repository(name):
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert source.count("\n") <= 150
    nodes = list(ast.walk(ast.parse(source)))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not {module.partition(".")[0] for module in imported} & {"examples", "tests", "benchmarks", *EXAMPLES}


@pytest.mark.parametrize("name", ["distributed", "image_classification", "mixed_precision"])
def test_a_copy_runs_from_any_folder(name, tmp_path):
    copy = tmp_path / "mine.py"
    copy.write_text((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert execute(copy, "--help", folder=tmp_path).startswith("usage: mine.py")
