"""The pages: their tables are those of the committed records."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from dcl_optim.trial.comparison import Comparison
from examples.research import records
from examples.research.applications import fine_tuning
from examples.research.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tables():
    specification = importlib.util.spec_from_file_location("results_tables", ROOT / "docs" / "results_tables.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_table_is_the_one_of_its_results_file(tables):
    assert tables.main(["--check"]) == 0


def test_a_changed_figure_is_noticed(tables, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "results" / "rivals.md").read_text()
    wrong = re.sub(r"\| kanji, 3 \| \+\d", "| kanji, 3 | +1", page)
    assert wrong != page
    (tmp_path / "page.md").write_text(wrong)
    monkeypatch.setattr(tables, "PAGES", (str(tmp_path / "page.md"),))
    assert tables.main(["--check"]) != 0
    assert tables.main([]) == 0
    assert (tmp_path / "page.md").read_text() == page


def test_every_record_is_a_run_of_an_experiment():
    names = {path.name for path in (ROOT / records.COMMITTED).glob("*.jsonl")}
    assert names <= {f"{name}.jsonl" for name in EXPERIMENTS} | {fine_tuning.RESULTS}
    assert {name.removesuffix(".jsonl") for name in records._choices(ROOT / records.COMMITTED)} <= EXPERIMENTS.keys()
    for name, experiment in EXPERIMENTS.items():
        for record in records.read(ROOT / records.COMMITTED / f"{name}.jsonl"):
            assert record["configuration"] == experiment.runs[record["label"]].as_dict(), name
            assert record.get("part", "test") == experiment.part, name


def test_the_demos_table_follows_from_its_runs():
    found = json.loads((ROOT / records.COMMITTED / "demo.json").read_text())
    table = str(Comparison(found["curves"], found["seeds"]))
    assert table.splitlines() == found["table"]
    assert f"\n{table}\n" in (ROOT / "docs" / "results" / "ablations.md").read_text(encoding="utf-8")
