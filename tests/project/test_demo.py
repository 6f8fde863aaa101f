"""The demo as its users run it, with tiny settings, and the script that it compares."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from dcl_optim import demo
from dcl_optim.demo import digits

TINY = ["--epochs", "2", "--seeds", "2"]
WIDTH = 90  # columns
PARTS = ("pool", "validation", "test")


def run(out, *flags):
    assert demo.main([*TINY, "--out", str(out), *flags]) == 0
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_a_run_prints_one_table_and_writes_its_files(tmp_path, capsys):
    results = run(tmp_path / "deep" / "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits: 50 training images, 2 epochs, 2 seeds"
    assert [line.partition("  ")[0] for line in lines[3:7]] == ["plain", "label smoothing", "DCP", "DCL"]
    assert re.match("(No two|Of the) .*methods beside plain", lines[8])
    assert lines[-4].startswith("Wrote ")
    assert lines[-3:-1] == demo.WHEN_IT_DIFFERS.splitlines()
    assert lines[-1] == "Other data, other methods: docs/results.md; wrong labels: docs/noisy-labels.md"
    assert max(map(len, lines[:-4])) <= WIDTH  # then there are paths
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {"results.json", "curves.png"}
    assert [len(runs) for runs in results["curves"].values()] == [2, 2, 2, 2]


def test_when_dcp_differs_from_label_smoothing_is_on_the_page_that_it_names():
    gain, page, anchor = re.search(r"gains\n(.*) points more than .*: (.*)#(.*)", demo.WHEN_IT_DIFFERS).groups()
    sections = re.split("^#+ ", (Path(__file__).parents[2] / page).read_text(encoding="utf-8"), flags=re.M)
    (section,) = [one for one in sections if one.startswith(anchor.replace("-", " ").capitalize())]
    assert re.search(rf"{gain}\b.* more than label smoothing", section, re.S)


def test_it_trains_with_one_thread_and_puts_their_number_back(monkeypatch, tmp_path):
    found = []
    train = demo.train

    def counted(method, seed, **settings):
        found.append(torch.get_num_threads())
        return train(method, seed, **settings)

    monkeypatch.setattr(demo, "train", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run(tmp_path, "--epochs", "1", "--seeds", "1")
        assert (set(found), torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", digits.METHODS)
def test_same_seeds_same_numbers(method):
    found = []
    for other in (1, 2):
        torch.manual_seed(other)
        found.append(list(digits.train(method, 0, epochs=2)))
    assert found[0] == found[1]


def test_the_penalty_is_the_term_of_each_method(monkeypatch):
    """With a penalty of 0 the methods are plain training: weights and batches are the same, and nothing else pulls."""
    plain = list(digits.train("plain", 3, epochs=6))
    for wrapper, method in ((digits.DCPOptimizer, "DCP"), (digits.DCLOptimizer, "DCL")):
        assert list(digits.train(method, 3, epochs=6)) != plain
        penalty = wrapper.penalty
        monkeypatch.setattr(wrapper, "penalty", lambda *given, penalty=penalty: 0 * penalty(*given))
        assert list(digits.train(method, 3, epochs=6)) == plain


def test_label_smoothing_is_the_rivals():
    plain = list(digits.train("plain", 0, epochs=6))
    assert list(digits.train("label smoothing", 0, epochs=6, label_smoothing=0.0)) == plain
    assert list(digits.train("label smoothing", 0, epochs=6)) != plain
    assert list(digits.train("plain", 0, epochs=6, label_smoothing=0.9)) == plain


@pytest.mark.parametrize(("epochs", "values"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_the_last_value_is_of_the_last_epoch(epochs, values):
    assert len(list(digits.train("plain", 0, epochs=epochs))) == values


def test_validation_images_are_other_images():
    assert list(digits.train("plain", 0, epochs=1)) != list(digits.train("plain", 0, epochs=1, split="validation"))


def test_wrong_labels_have_a_row_of_the_companion(tmp_path, capsys):
    wrong = run(tmp_path, "--wrong-labels", "0.3", "--seeds", "1")["curves"]
    assert list(wrong) == [*digits.METHODS, "DCL's companion"]
    assert wrong["DCL's companion"] != wrong["DCL"]
    said = capsys.readouterr().out
    assert "digits: 300 training images (30% wrong labels), 2 epochs, 1 seeds\n" in said
    assert demo.WHEN_IT_DIFFERS not in said


@pytest.mark.parametrize(("flags", "expected"), [([], (100, 10, 50)), (["--wrong-labels", "0.3"], (50, 5, 300))])
def test_how_much_is_trained(flags, expected, monkeypatch, tmp_path):
    asked = []

    def compare(train, methods, seeds):
        asked.append((train.keywords["epochs"], seeds, train.keywords["train_size"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "compare", compare)
    assert demo.main([*flags, "--out", str(tmp_path)]) == 130
    assert asked == [expected]
    assert not list(tmp_path.iterdir())


def test_as_many_labels_are_wrong_in_every_seed():
    for seed in range(3):
        images, right = digits.training_images(seed, 200, 0.0)
        same, wrong = digits.training_images(seed, 200, 0.3)
        assert torch.equal(images, same)
        assert int((wrong != right).sum()) == 60
        assert (int(wrong.min()), int(wrong.max())) == (0, 9)
        assert right.bincount().tolist() == pytest.approx([20] * 10, abs=1)
    assert not torch.equal(images, digits.training_images(0, 200, 0.0)[0])


def test_splits_are_disjoint_stratified_and_fixed():
    labels = torch.tensor([0, 1] * 40 + [2] * 20)
    order = digits.stratified_order(labels, seed=3)
    assert sorted(order.tolist()) == list(range(100))
    assert labels[order[:50]].bincount().tolist() == [20, 20, 10]
    assert torch.equal(order, digits.stratified_order(labels, seed=3))
    assert not torch.equal(order, digits.stratified_order(labels, seed=4))

    splits = [digits.load_digits()[name] for name in PARTS]
    assert [len(labels) for _, labels in splits] == [800, 400, 597]
    for images, labels in splits:
        assert images.shape[1:] == (1, 8, 8)
        assert labels.bincount().max() <= 1.1 * labels.bincount().min()
    images = torch.cat([images.flatten(1) for images, _ in splits])
    assert len(images.unique(dim=0)) == len(images)  # no image is in two splits


@pytest.mark.parametrize(
    "flags",
    [
        ["--epochs", "0"],
        ["--seeds", "-1"],
        ["--wrong-labels", "-0.1"],
        ["--wrong-labels", "1.1"],
        ["--wrong-labels", "nan"],
        ["--out", __file__],
    ],
)
def test_bad_flags(flags, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        demo.main(flags if "--out" in flags else ["--out", str(tmp_path), *flags])
    assert stopped.value.code == 2
    line = capsys.readouterr().err.rpartition("dcl-demo: error: ")[2]
    assert flags[-1 if "--out" in flags else 0] in line


@pytest.mark.parametrize(("package", "extra"), [("sklearn.datasets", "demo"), ("tqdm", "trial")])
def test_without_an_optional_package(package, extra, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"dcl-optim[{extra}]" in capsys.readouterr().err
