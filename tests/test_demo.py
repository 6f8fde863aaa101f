"""The demo as its users run it, with tiny settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcl_optim import __version__, demo
from dcl_optim.demo import digits, report, training
from tests.helpers import PATIENCE

TINY = ["--epochs", "2", "--seeds", "2", "--train-size", "64"]


def run(out: Path, *flags: str) -> dict:
    assert demo.main([*TINY, "--out", str(out), *flags]) == 0
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def untimed(results: dict) -> dict:
    return {
        method: [{key: value for key, value in history.items() if key != "seconds"} for history in histories]
        for method, histories in results["histories"].items()
    }


def test_a_run_prints_one_table_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = run(tmp_path / "deep" / "out")
    printed, errors = capsys.readouterr()
    assert errors == ""  # no progress bar where nobody watches
    lines = printed.splitlines()
    starts = [line.split()[0] for line in lines[2:7] if line]
    assert starts == ["method", "-" * len(lines[3]), "plain", "DCL", "DCP"]
    assert lines[0] == "digits: 64 training and 597 test images, 2 epochs, 2 seeds; default weight and alpha"
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {"results.json", "curves.png"}
    assert results["arguments"]["epochs"] == 2
    assert results["interrupted"] is False
    assert [len(results["histories"][method]) for method in training.METHODS] == [2, 2, 2]
    plain, dcl, dcp = results["table"]
    parameters = sum(p.numel() for p in digits.make_model().parameters())
    assert [row["parameters_added"] for row in (plain, dcl, dcp)] == [0, parameters, 0]
    assert plain["bytes_added"] == 0
    assert dcl["bytes_added"] > 2 * 4 * parameters  # the companion and its momentum
    assert dcp["bytes_added"] == 10 * 10 * 4 + 10  # the prototypes, and which classes have one
    assert plain["relative_time"] == 1


def test_same_seeds_same_numbers(tmp_path: Path):
    torch.manual_seed(1)
    first = untimed(run(tmp_path / "a"))
    torch.manual_seed(2)
    assert untimed(run(tmp_path / "b")) == first


def test_weight_zero_is_plain_training(tmp_path: Path):
    """All methods of a seed start from the same weights and draw the same batches."""
    results = run(tmp_path, "--weight", "0")
    for plain, *others in zip(*results["histories"].values(), strict=True):
        for other in others:
            assert other["accuracy"] == plain["accuracy"]
            assert other["consistency"] == plain["consistency"]


def test_by_default_weight_and_alpha_are_the_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two epochs of several batches each: one batch alone would leave alpha without an effect."""
    small = ("--seeds", "1", "--train-size", "200")
    default = untimed(run(tmp_path / "default", *small))
    other = untimed(run(tmp_path / "other", *small, "--weight", "0.5", "--alpha", "0.1"))
    for method, alpha in (("DCL", "0.6"), ("DCP", "0.97")):
        given = untimed(run(tmp_path / "given", *small, "--weight", "0.1", "--alpha", alpha))
        assert "seeds; weight 0.1, alpha " + alpha in capsys.readouterr().out
        assert default[method] == given[method] != other[method]


def test_validation_images_are_other_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, "--validation")
    assert "400 validation images" in capsys.readouterr().out


def test_splits_are_disjoint_stratified_and_fixed():
    labels = torch.tensor([0, 1] * 40 + [2] * 20)
    order = digits.stratified_order(labels, seed=3)
    assert sorted(order.tolist()) == list(range(100))
    assert labels[order[:50]].bincount().tolist() == [20, 20, 10]
    assert torch.equal(order, digits.stratified_order(labels, seed=3))
    assert not torch.equal(order, digits.stratified_order(labels, seed=4))

    splits = digits.load_digits()
    assert [len(labels) for _, labels in splits] == [digits.POOL_SIZE, digits.VALIDATION_SIZE, digits.TEST_SIZE]
    for images, labels in splits:
        assert images.shape[1:] == (1, 8, 8)
        assert labels.bincount().max() <= 1.1 * labels.bincount().min()
    whole = digits.stratified_order(torch.cat([labels for _, labels in splits]), 0)
    assert len(whole.unique()) == digits.POOL_SIZE + digits.VALIDATION_SIZE + digits.TEST_SIZE
    images = torch.cat([images.flatten(1) for images, _ in splits])
    assert len(images.unique(dim=0)) == len(images)  # no image is in two splits


def interrupt_in_seed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    train = training.Run.epoch

    def epoch(self: training.Run) -> None:
        if self.history["seed"] == seed and self.history["seconds"]:
            raise KeyboardInterrupt
        train(self)

    monkeypatch.setattr(training.Run, "epoch", epoch)


def test_ctrl_c_reports_the_finished_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    interrupt_in_seed(monkeypatch, 1)
    assert demo.main([*TINY, "--out", str(tmp_path)]) == 130
    printed, errors = capsys.readouterr()
    assert "1 seed" in printed
    assert "DCL" in printed
    assert "1 of 2 seeds were finished" in errors
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    assert [len(runs) for runs in results["histories"].values()] == [1, 1, 1]
    assert results["table"][0]["accuracy_error"] is None
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_ctrl_c_before_the_first_seed_is_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    interrupt_in_seed(monkeypatch, 0)
    assert demo.main([*TINY, "--out", str(tmp_path)]) == 130
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert "0 of 2 seeds were finished" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--epochs", "0"],
        ["--seeds", "-1"],
        ["--train-size", "9"],
        ["--train-size", "801"],
        ["--alpha", "1.1"],
        ["--alpha", "nan"],
        ["--weight", "-1"],
        ["--weight", "inf"],
        ["--lr", "0"],
        ["--epochs", "two"],
        ["--out", __file__],
        ["--preset", "paper"],
        ["--unknown"],
    ],
)
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--out", str(tmp_path), *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_without_an_optional_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"dcl-optim\[demo\]"):
        demo.main(["--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("difference", "error", "expected"),
    [
        (0.5, 0.2, "DCL wins"),
        (-0.5, 0.2, "DCL loses"),
        (0.4, 0.2, "DCL is within noise"),
        (-0.3, 0.2, "DCL is within noise"),
        (0.0, 0.0, "DCL is within noise"),
        (1.0, None, "one seed"),
    ],
)
def test_verdict(difference: float, error: float | None, expected: str):
    assert expected in report.verdict(report.Row("DCL", 97.0, error, difference, error, 2.0, 0, 0))


def test_the_table_is_of_the_last_epoch_and_of_differences_by_seed():
    def run(*accuracy: float) -> dict:
        return {"accuracy": accuracy, "seconds": [1.0], "parameters_added": 0, "bytes_added": 0}

    plain, ours = report.summarise({"plain": [run(0.5, 0.4), run(0.6, 0.7)], "DCL": [run(0.9, 0.5), run(0.8, 0.7)]})
    assert (plain.accuracy, ours.accuracy) == pytest.approx((55, 60))
    assert (ours.minus_plain, ours.minus_plain_error) == pytest.approx((5, 5))


def test_threads_are_left_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    run(tmp_path, "--seeds", "1", "--epochs", "1")
    assert seen == [1, 5]


def test_as_a_module():
    command = [sys.executable, "-m", "dcl_optim", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == f"dcl-optim {__version__}"


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        demo.main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--epochs", "--seeds", "--train-size", "--alpha", "--weight", "--validation", "--out"):
        assert flag in text
    assert "default: 40" in text
    assert "default: each optimizer's own" in " ".join(text.split())
