"""The paper's rows: their numbers, names and trainings, the list of them, and the table at the end."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from examples.research.configuration import PAPER
from examples.research.datasets.folders import SOURCES
from examples.research.paper import estimate, report, tables
from examples.research.paper.command import main
from examples.research.paper.recipes import Recipe
from examples.research.paper.rows import Row, Table, select, works

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
        "readings": 9,
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
        "readings": 720.2,
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
            column, line = row.name.partition("/")[::2]
            assert select(table, [f"{line}/{column}"]) == [row]
    main_table = TABLES["main"]
    assert [row.column for row in select(main_table, ["cifar-100-resnet18"])] == ["CE", "PT", "DCL"]
    of_resnet18 = select(TABLES["baselines"], ["cifar-100-resnet18"])
    assert [row.line for row in of_resnet18] == ["CE", "DML", "SAM", "PSKD", "SAF", "GAM", "DCL", "DCP"]
    assert select(TABLES["baselines"], ["cifar-100-resnet18/dcp"]) == of_resnet18[-1:]
    with pytest.raises(ValueError, match="row 'cifar-100-resnet18/dcp' is of another table: baselines, readings"):
        select(main_table, ["cifar-100-resnet18/dcp"], TABLES)
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


def test_the_list_has_each_row_with_its_number_and_times_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "price", lambda work, session: pytest.fail("this takes a minute"))
    main(["--list", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    for name, table in TABLES.items():
        part = shown[shown.index(f"{name} ({table.place})") :]
        for row in table.rows:
            line = re.search(rf"^  {re.escape(row.name)} +(.*)$", part, re.M)
            assert line is not None, row.name
            assert line[1].startswith("figure" if row.paper is None else str(row.paper)), row.name
    assert re.search(r"cifar-100-resnet18/dcl +82.4  resnet18 on cifar100, dcl weight=1.0", shown)
    assert re.search(r"dcp/cifar-100-resnet18 +81.0 ± 0.21  resnet18", shown)
    assert "the run of main cifar-100-resnet18/dcl" in shown


def test_the_time_of_each_row_is_shown_where_it_is_asked_for(tmp_path, capsys, monkeypatch):
    """A tenth of a millisecond for an image: 50,000 images, 200 epochs, 1000 s; twice that with DCL."""
    monkeypatch.setattr(estimate, "price", lambda work, session: estimate.Price(1e-4, 1, 1, 1))
    main(["--hours", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    assert re.search(r"cifar-100-resnet18/ce +78.3 +16.7 min  resnet18", shown)
    assert re.search(r"cifar-100-resnet18/dcl +82.4 +33.4 min  resnet18", shown)
    assert re.search(r"n-10/voting +81\.0 +2\.8 h  resnet18", shown)
    assert re.search(r"mae/imagenet +82\.8 +16\.7 min  vit", shown)
    assert re.search(r"before these, once: +28\.5 h  vit-base on imagenet", shown)
    monkeypatch.setattr(estimate, "price", lambda work, session: estimate.Price(0.1, 1, 1, 1))
    main(["self-supervised", "--hours", f"--out={tmp_path}", "--device=cpu"])
    assert re.search(r"before these, once: +3\.3 years  vit-base on imagenet", capsys.readouterr().out)


# Words of each setting that differs from the paper's text, or that it leaves open: where a reader looks for it.
TOLD = {
    "Equation 5's mean": ("about 70 times", "baselines"),
    "Section 3.2's distance": ("K/2", "main"),
    "RandAugment": ("rand-m9-mstd0.5-inc1", "main"),
    "RandomCrop of ImageNet": ("RandomCrop of ImageNet is 224", "main"),
    "Table 4's data": ("Tiny-ImageNet", "self-supervised"),
    "fine-tuning's crop": ("scaled to 256", "fine-tuning"),
    "PT's decay": ("5e-4", "main"),
    "CE's two errors": ("0.32", "baselines"),
    "ImageNet's test images": ("50,000", "main"),
    "warm-up": ("warm-up", "main"),
    "temperatures": ("temperature", "distances"),
    "widths": ("widths", "companion-sizes"),
    "border": ("border of 4", "main"),
    "the rivals on ImageNet": ("batches of 256", "baselines"),
}


@pytest.mark.parametrize("setting", TOLD)
def test_a_setting_that_the_paper_leaves_open_is_told_in_the_list_and_on_the_page(setting, capsys):
    words, table = TOLD[setting]
    main([table, "--list"])
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown
    page = Path(__file__).parents[3] / "docs" / "reproduce.md"
    part = page.read_text().partition("## Where the paper is not clear")[2].partition("\n## ")[0]
    first = words.split()[0] if setting == "RandomCrop of ImageNet" else words
    assert first in " ".join(part.split())


def test_the_paper_is_read_as_it_is_written():
    """RandomCrop, not RandomResizedCrop; the fine-tuning of Table 4 on Tiny-ImageNet, by its caption."""
    of = {f"{name} {row.name}": row.work for name, table in TABLES.items() for row in table.rows}
    crops = {name: SOURCES[of[name].configuration.data][1].crop for name in ("main imagenet-resnet50/ce",)}
    assert crops == {"main imagenet-resnet50/ce": "cut"}
    other = of["readings imagenet-resnet50-randomresizedcrop/ce"].configuration
    assert SOURCES[other.data][1].crop == "resized"
    assert replace(other, data="imagenet") == of["main imagenet-resnet50/ce"].configuration
    assert of["self-supervised mae/imagenet"].configuration.data == "tiny-imagenet-224"
    assert of["self-supervised mae/imagenet"].needs.configuration.data == "imagenet-resized"


def test_without_arguments_the_tables_are_named(capsys):
    main([])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", shown, re.M) for name in tables.NAMES)


def made(values, first=0, **companion):
    """The records of some seeds, in any order."""
    found = [
        {"seed": first + number, "accuracy": {"model": value / 100} | {k: v[number] for k, v in companion.items()}}
        for number, value in enumerate(values)
    ]
    random.Random(0).shuffle(found)
    return found


CE, DCL = (row.work for row in select(TABLES["main"], ["cifar-100-resnet18/ce", "cifar-100-resnet18/dcl"]))


def test_the_table_is_the_one_computed_by_hand():
    """Student's t has 4.303 for three seeds and 3.182 for four.

    CE 78, 79, 80, 83: 80 ± 1.08, from 77.3 by 2.5 errors, which are none of 3.182. DCL, of the last three seeds, 80.5,
    81, 81.5: 81 ± 0.289, from 82.4 by 4.85; its companion 80, 80, 80. By the seeds of both: 1.5, 1, -1.5.
    """
    rows = [Row("ResNet18", "CE", CE, 77.3), Row("ResNet18", "DCL", DCL, 82.4, companion=80.4)]
    records = {
        CE.key(0): made([78, 79, 80, 83]),
        DCL.key(0): made([80.5, 81.0, 81.5], first=1, companion=[0.8, 0.8, 0.8]),
    }
    lines = report.table(Table("title", "Table 1", rows), records).splitlines()
    assert lines[2] == "| | CE | DCL |"
    assert lines[4] == "| ResNet18 | 80.00 ± 1.08, n = 4; paper 77.3 | 81.00 ± 0.29, n = 3; paper 82.4 ! |"
    assert "| ResNet18 | 80.00 ± 0.00, n = 3; paper 80.4 ! |" in lines
    mean, error = 1 / 3, math.sqrt((1.5 - 1 / 3) ** 2 + (1 - 1 / 3) ** 2 + (1.5 + 1 / 3) ** 2) / math.sqrt(6)
    low, high = mean - 4.3027 * error, mean + 4.3027 * error
    gain = f"ResNet18: DCL - CE = +{mean:.2f} ± {error:.2f} ({low:+.2f} to {high:+.2f}) in 3 paired seeds"
    assert f"{gain}; the paper 5.1 !" in lines


def test_the_papers_standard_error_counts_and_one_seed_decides_nothing():
    """4.303 hypot(0.289, 0.26) is 1.67, and 4.303 * 0.289 alone is 1.24."""
    rows = [Row("CE", "ResNet18", CE, 78.3, 0.32), Row("DCL", "ResNet18", DCL, 82.4, 0.26)]
    table = Table("title", "Table 2", rows)
    records = {DCL.key(0): made([80.5, 81.0, 81.5])}
    assert "| DCL | 81.00 ± 0.29, n = 3; paper 82.4 ± 0.26 |" in report.table(table, records)
    rows[1] = replace(rows[1], error=None)
    assert "| DCL | 81.00 ± 0.29, n = 3; paper 82.4 ! |" in report.table(table, records)
    one = report.table(table, {CE.key(0): made([20.0]), DCL.key(0): made([33.5])})
    assert "| DCL | 33.50, n = 1; paper 82.4 |" in one
    assert "\nResNet18: DCL - CE = +13.50 in 1 paired seed; the paper 4.1\n" in one
    apart = {CE.key(0): made([20.0]), DCL.key(0): made([33.5], first=1)}
    assert "paired" not in report.table(table, apart)
    assert report.table(table, {}) == ""


def test_each_method_is_paired_with_its_plain_training():
    """By table: the rows that have one in it."""
    records = {row.work.key(0): made([50.0, 60.0]) for row in ROWS}
    counts = {}
    for name, table in TABLES.items():
        lines = [line for line in report.table(table, records).splitlines() if "paired seeds" in line]
        counts[name] = len(lines)
        assert all(" = +0.00 ± 0.00 (+0.00 to +0.00) in 2 paired seeds" in line for line in lines)
        if name == "distillation":
            assert lines[1].startswith("KD: w/ DCL - w/o DCL = ")
            assert lines[1].endswith("; the paper 1.2 !")
        if name == "readings":
            assert lines[2].startswith("half the squared norm, DCL - CIFAR-100 ResNet18, CE = ")
    assert counts == {
        "main": 12,
        "baselines": 20,
        "fine-tuning": 4,
        "semi-supervised": 3,
        "self-supervised": 5,
        "distillation": 5,
        "distances": 4,
        "augmentations": 4,
        "companion-sizes": 0,
        "companion-data": 0,
        "alpha": 0,
        "ensembles": 0,
        "readings": 7,
        "figures": 4,
    }


def test_a_seed_that_diverged_is_named():
    rows = [Row("ResNet18", "CE", CE, 78.3), Row("ResNet18", "DCL", DCL, 82.4)]
    diverged = {"seed": 2, "accuracy": {}, "diverged": 3}
    records = {CE.key(0): made([78.0, 79.0, 80.0]), DCL.key(0): [*made([80.0, 81.0]), diverged]}
    shown = report.table(Table("title", "Table 1", rows), records)
    assert "80.50 ± 0.50, n = 2; paper 82.4; seed 2 diverged in epoch 3 |" in shown
    assert "DCL - CE = +2.00 ± 0.00 (+2.00 to +2.00) in 2 paired seeds" in shown
    alone = report.table(Table("title", "Table 1", rows), {DCL.key(0): [diverged]})
    assert "| ResNet18 | seed 2 diverged in epoch 3 |" in alone
