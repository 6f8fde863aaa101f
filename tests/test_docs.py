"""The pages: their tables are those of the committed results files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables():
    specification = importlib.util.spec_from_file_location("results_tables", ROOT / "docs" / "results_tables.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_table_is_the_one_of_its_results_file(tables):
    assert tables.main(["--check"]) == 0


def test_a_changed_figure_is_noticed(tables, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "performance.md").read_text()
    wrong = re.sub(r"\| plain \| \d", "| plain | 9", page)
    assert wrong != page
    (tmp_path / "page.md").write_text(wrong)
    monkeypatch.setattr(tables, "PAGES", (str(tmp_path / "page.md"),))
    assert tables.main(["--check"]) != 0
    assert tables.main([]) == 0
    assert (tmp_path / "page.md").read_text() == page


def test_all_results_are_on_a_page():
    page = "".join((ROOT / "docs" / name).read_text() for name in ("results.md", "applications.md"))
    for path in (ROOT / "docs" / "results").glob("*.jsonl"):
        kind = path.stem.split("-")[0]
        assert path.stem in page or f"{kind}-{{" in page, path.stem
