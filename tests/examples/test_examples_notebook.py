"""The notebook runs as a reader would run it, and the outputs that are committed are those of its code.

``python -m tests.examples.test_examples_notebook`` executes it again and writes them.
"""

import os
import re
from base64 import b64decode
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
KERNEL = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
FIGURE = re.compile(r"[+-]?\d+\.\d+")


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook):
    """Run the cells in a process of their own; an error in one is an error here."""
    notebook = NotebookClient(notebook, record_timing=False, timeout=300).execute()
    del notebook.metadata["language_info"]  # the Python that happened to run it
    return notebook


def shown(notebook):
    """What each cell of code shows."""
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def printed(outputs):
    return "".join(output.get("text", "") for output in outputs)


def images(outputs):
    return [b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook, run elsewhere and with errors in place of warnings."""
    notebook, folder = read(), tmp_path_factory.mktemp("notebook")
    strict = nbformat.v4.new_code_cell("import warnings; warnings.simplefilter('error')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in KERNEL.items():
            patch.setenv(name, value)
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        notebook.cells.insert(0, strict)
        execute(notebook)
    assert list(folder.iterdir()) == [], "the notebook leaves no file behind"
    del notebook.cells[0]
    return notebook


def test_the_committed_figures_are_those_of_the_code(executed):
    """But for the few images that another processor's rounding may classify otherwise: five are 0.3 points."""
    ours, committed = shown(executed), shown(read())
    assert ours.keys() == committed.keys()
    for name, outputs in ours.items():
        found, expected = printed(outputs), printed(committed[name])
        assert name != "resume" or found.endswith("equals the uninterrupted one: True\n")
        assert FIGURE.sub("", found) == FIGURE.sub("", expected)
        figures = [[float(figure) for figure in FIGURE.findall(text)] for text in (found, expected)]
        assert figures[0] == pytest.approx(figures[1], abs=0.3)
        assert len(images(outputs)) == len(images(committed[name])) == (name in ("curves", "penalty"))


def test_what_is_committed_is_small_and_the_same_after_each_run():
    """Neither times nor the kernel's version, whose changes would hide those of the figures."""
    notebook = read()
    assert notebook.metadata == {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    assert all(cell.metadata == {} and re.fullmatch("[a-z]+", cell.id) for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert all(image.startswith(b"\x89PNG") for outputs in shown(notebook).values() for image in images(outputs))
    assert NOTEBOOK.stat().st_size < 150_000


if __name__ == "__main__":
    os.environ |= KERNEL
    nbformat.write(execute(read()), NOTEBOOK)
