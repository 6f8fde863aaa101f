"""Each row has a command that a smoke test runs on generated files in the formats of the data sets."""

import re

import pytest

from examples.research.applications.masked_autoencoder import networks as autoencoders
from examples.research.paper import tables
from examples.research.paper.command import main
from examples.research.paper.recipes import Recipe
from examples.research.tests import paper_files
from tests.helpers import cells

ROWS = [(name, row.name) for name, table in tables.build(Recipe()).items() for row in table.rows]
# One of each method, task, data set and kind of network; the others differ in a number or a name.
SOME = [
    *(("main", name) for name in ("cifar-100-shufflenetv2/pt", "tiny-imagenet-shufflenetv2/dcl")),
    *(("main", name) for name in ("imagenet-resnet18/dcl", "imagenet-vit-t/ce")),
    *(("baselines", f"{name}/cifar-100-resnet18") for name in ("dml", "sam", "pskd", "saf", "gam", "dcp")),
    *(("fine-tuning", name) for name in ("ce/cub-200", "dcl/oxford-pet", "ce/stanford-car", "ce/food-101")),
    ("semi-supervised", "fixmatch-dcl/40-labels"),
    ("self-supervised", "mae-dcl/cub-200"),
    *(("distillation", name) for name in ("w-o-dcl/teacher", "w-dcl/student", "w-dcl/kd", "w-dcl/reviewkd")),
    *(("distillation", name) for name in ("w-dcl/simkd", "w-o-dcl/dkd")),
    *(("distances", f"resnet18/{name}") for name in ("infonce", "kl-divergence", "l1")),
    ("augmentations", "cifar-100-wrn28-10-ta/ce"),
    ("companion-sizes", "accuracy/resnet10-xs"),
    ("companion-data", "accuracy/50"),
    *(("alpha", name) for name in ("accuracy/t-1-t", "accuracy/double-rate")),
    *(("ensembles", f"n-2/{name}") for name in ("voting", "bagging", "snapshot")),
    *(("readings", f"{name}/dcp") for name in ("a-sum-of-class-means", "half-the-squared-norm")),
    ("readings", "imagenet-resnet50-randomresizedcrop/ce"),
    ("figures", "shufflenetv2/dcl"),
]


@pytest.fixture(scope="module")
def root(paper_root):
    paper_files.weights(paper_root)
    return paper_root


@pytest.mark.parametrize(("table", "row"), cells(ROWS, *SOME))
def test_a_row_runs_on_files_of_the_right_format(table, row, files, root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(autoencoders, "SIZE", paper_files.TINY)  # the size itself: the smoke test by hand
    command = [table, row, "--smoke", f"--data-root={root}", f"--out={tmp_path}", "--device=cpu", "--workers=0"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    shown = capsys.readouterr().out
    assert ended.value.code == 0, shown
    assert re.search(rf"^{table} {re.escape(row)}: ok +2 steps, loss \d", shown, re.M), shown
    assert "would be refused" not in shown
    assert list(tmp_path.iterdir()) == []


def test_some_are_of_each_table():
    assert {table for table, _ in SOME} == set(tables.NAMES)
    assert set(SOME) <= set(ROWS)


def test_a_failing_row_is_said_and_the_others_are_tried(files, tmp_path, capsys):
    """Voting and bagging fail, snapshots do not."""
    command = ["ensembles", "n-2", "--smoke", f"--data-root={files}", f"--out={tmp_path}", "--device=cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.research.methods.ensembles.Voting.step", lambda *given: 1 / 0)
        with pytest.raises(SystemExit) as ended:
            main([*command, "--workers=0"])
    shown = capsys.readouterr().out
    assert ended.value.code == 1
    assert "n-2/voting: FAILED ZeroDivisionError: division by zero" in shown
    assert "n-2/snapshot: ok" in shown
    assert "2 failed" in shown


def test_what_a_whole_run_would_refuse_is_said(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(paper_files.listings.SIZES, "cifar100", (100, 50_000, 10_000))
    with pytest.raises(SystemExit):
        main(["ensembles", "n-2/snapshot", "--smoke", f"--data-root={files}", f"--out={tmp_path}", "--workers=0"])
    said = "cifar100 in {} has 4 classes, 16 training and 4 test images, but the whole data set has 100 classes, 50,000"
    shown = capsys.readouterr().out
    assert f"would be refused: {said.format(files)}" in shown
    assert "for images of your own: python -m examples.image_classification --paper --images DIR" in shown
