"""The paper's rows: their numbers, names and trainings, the list of them, and the table at the end."""

import re

import pytest

from examples.research.configuration import PAPER
from examples.research.paper import estimate, report, tables
from examples.research.paper.command import main
from examples.research.paper.recipes import Recipe
from examples.research.paper.rows import Row, Table, Work, select, works

TABLES = tables.build(Recipe())
ROWS = [row for table in TABLES.values() for row in table.rows]


def numbers(name):
    return [row.paper for row in TABLES[name].rows]


def test_the_numbers_are_the_papers():
    """Counts and sums, added up from the printed tables."""
    assert {name: len(table.rows) for name, table in TABLES.items()} == {
        "main": 28,
        "baselines": 23,
        "fine-tuning": 8,
        "semi-supervised": 6,
        "self-supervised": 10,
        "distillation": 11,
        "distances": 5,
        "augmentations": 8,
        "companion-sizes": 6,
        "companion-data": 5,
        "alpha": 15,
        "ensembles": 7,
        "figures": 8,
    }
    sums = {name: round(sum(filter(None, numbers(name))), 2) for name in TABLES}
    assert sums == {
        "main": 2042.7,
        "baselines": 1842.2,
        "fine-tuning": 635.8,
        "semi-supervised": 174.9,
        "self-supervised": 855.2,
        "distillation": 835.6,
        "distances": 404.5,
        "augmentations": 642.2,
        "companion-sizes": 485.6,
        "companion-data": 407.2,
        "alpha": 1221.1,
        "ensembles": 557.2,
        "figures": 0,
    }
    companions = [row.companion for row in ROWS if row.companion is not None]
    assert len(companions) == 18
    assert sum(companions) == pytest.approx(336.5 + 866.14)


def test_names_are_unique_and_find_their_rows():
    for table in TABLES.values():
        names = [row.name for row in table.rows]
        assert len(set(names)) == len(names)
        for row in table.rows:
            assert select(table, [row.name]) == [row]
    main_table = TABLES["main"]
    assert [row.column for row in select(main_table, ["cifar-100-resnet18"])] == ["CE", "PT", "DCL"]
    assert select(main_table, []) == main_table.rows
    with pytest.raises(ValueError, match="row 'cifar-100-resnet17' is unknown; choose from cifar-100-resnet1"):
        select(main_table, ["cifar-100-resnet17"])


def test_tables_share_a_training():
    of = {(name, row.name): row.work.key(0) for name, table in TABLES.items() for row in table.rows}
    same = [("main", "cifar-100-resnet18/dcl"), ("baselines", "dcl/cifar-100-resnet18"), ("distances", "resnet18/mse")]
    same += [("alpha", "accuracy/0.6"), ("companion-data", "accuracy/100"), ("ensembles", "n-2/dcl")]
    assert len({of[one] for one in same}) == 1
    assert len(works(ROWS)) == len({work.key(0) for work in works(ROWS)})
    found = works(TABLES["self-supervised"].rows)
    assert [work.task for work in found] == ["reconstruct", *["tune"] * 5, "reconstruct", *["tune"] * 5]


def test_the_settings_are_the_papers_or_ours():
    row = select(TABLES["main"], ["cifar-100-resnet18/dcl"])[0]
    chosen = row.work.configuration
    assert chosen.options == PAPER == {"weight": 1.0, "alpha": 0.6, "distance": "squared"}
    assert (chosen.epochs, chosen.batch_size, chosen.lr, chosen.weight_decay) == (200, 128, 0.1, 5e-4)
    assert (chosen.augmentation, chosen.train_size) == ("basic", None)
    changed = Recipe("package", "authors", epochs=3, batch_size=16, precision="bfloat16")
    ours = select(tables.build(changed)["main"], ["cifar-100-resnet18/dcl"])[0].work.configuration
    assert ours.options == {"weight": 0.1, "alpha": 0.99, "distance": "mse"}
    assert (ours.augmentation, ours.epochs, ours.batch_size, ours.precision) == ("authors", 3, 16, "bfloat16")
    imagenet = select(tables.build(changed)["main"], ["imagenet-resnet50/dcl"])[0].work.configuration
    assert imagenet.augmentation == "rand"


def test_the_list_has_each_row_with_its_number_and_its_hours(tmp_path, capsys, monkeypatch):
    """A tenth of a millisecond for an image: 50,000 images, 200 epochs, 1000 s; twice that with DCL."""
    monkeypatch.setattr(estimate, "price", lambda work, session: estimate.Price(1e-4, 1, 1, 1))
    main(["--list", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    for name, table in TABLES.items():
        part = shown[shown.index(f"{name} ({table.place})") :]
        for row in table.rows:
            line = re.search(rf"^  {re.escape(row.name)} +(.*)$", part, re.M)
            assert line is not None, row.name
            assert line[1].startswith("figure" if row.paper is None else str(row.paper)), row.name
    assert re.search(r"cifar-100-resnet18/ce +78.3 ± 0.26 +0.3 h ", shown)
    assert re.search(r"cifar-100-resnet18/dcl +82.4 ± 0.26 +0.6 h ", shown)
    assert re.search(r"n-10/voting +81\.0 ± 0\.26 +2\.8 h ", shown)
    assert "the run of main cifar-100-resnet18/dcl" in shown


def test_without_arguments_the_tables_are_named(capsys):
    main([])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", shown, re.M) for name in tables.NAMES)


def test_the_table_is_the_one_computed_by_hand():
    """CE 78, 79: 78.5 ± 0.5, within 0.5 of 78.3; DCL 80, 80.4: 80.2 ± 0.2, below 82.4 by more than twice 0.33."""
    ce, dcl = Work(Recipe().work(TABLES["main"].rows[0].work.configuration).configuration), TABLES["main"].rows[2].work
    rows = [Row("ResNet18", "CE", ce, 78.3, 0.26), Row("ResNet18", "DCL", dcl, 82.4, 0.26, 80.4)]
    records = {
        ce.key(0): [{"accuracy": {"model": value}} for value in (0.78, 0.79)],
        dcl.key(0): [{"accuracy": {"model": value, "companion": 0.8}} for value in (0.80, 0.804)],
    }
    lines = report.table(Table("title", "Table 1", rows), records).splitlines()
    assert lines[2] == "| | CE | DCL |"
    assert lines[4] == "| ResNet18 | 78.50 ± 0.50 (78.3 ± 0.26) | 80.20 ± 0.20 (82.4 ± 0.26) ! |"
    assert "| ResNet18 | 80.00 ± 0.00 (80.4) ! |" in lines
    one = {dcl.key(0): [{"accuracy": {"model": 0.5}}]}
    assert "| ResNet18 | 50.00 (82.4 ± 0.26) |" in report.table(Table("title", "Table 1", rows), one)
    assert report.table(Table("title", "Table 1", rows), {}) == ""
