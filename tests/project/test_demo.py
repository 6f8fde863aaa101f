"""The demo as its users run it, with tiny settings."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
import tqdm

from dcl_optim import __version__, demo
from dcl_optim.demo import arguments, digits, report, training
from tests.helpers import PATIENCE

TINY = ["--epochs", "2", "--seeds", "2", "--train-size", "64"]
LOADING = "dcl-demo: loading scikit-learn and matplotlib ...\n"
WIDTH = 80  # columns of a terminal


def run(out: Path, *flags: str) -> dict:
    assert demo.main([*TINY, "--out", str(out), *flags]) == 0
    return read(out / "results.json")


def read(path: Path) -> dict:
    """JSON as its standard has it: Python's own reader takes NaN and Infinity too."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def untimed(results: dict) -> dict:
    return {
        method: [{key: value for key, value in history.items() if key != "seconds"} for history in histories]
        for method, histories in results["histories"].items()
    }


def test_a_run_prints_one_table_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = run(tmp_path / "deep" / "out")
    printed, errors = capsys.readouterr()
    plan, progress = errors.split(LOADING)
    assert progress == ""  # no progress bar where nobody watches
    assert "64 of scikit-learn's 8x8 digits" in plan
    assert "2 seeds of 2 epochs, which takes a minute or less" in plan
    lines = printed.splitlines()
    assert max(map(len, lines[:-1])) <= WIDTH  # the last has paths
    starts = [line.partition("  ")[0] for line in lines[3:9] if line]
    assert starts == ["method", "-" * len(lines[4]), "plain", "label smoothing", "DCP", "DCL"]
    assert lines[0] == "digits: 64 training and 597 test images, 2 epochs, 2 seeds"
    assert lines[1] == "default weight and alpha; label smoothing 0.4"
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {"results.json", "curves.png"}
    assert results["arguments"]["epochs"] == 2
    assert results["interrupted"] is False
    assert [len(results["histories"][method]) for method in training.METHODS] == [2, 2, 2, 2]
    plain, _, dcp, dcl = results["table"]
    parameters = sum(p.numel() for p in digits.make_model().parameters())
    assert [row["parameters_added"] for row in (plain, dcl, dcp)] == [0, parameters, 0]
    assert plain["bytes_added"] == 0
    assert dcl["bytes_added"] > 2 * 4 * parameters  # the companion and its momentum
    assert dcp["bytes_added"] == 10 * 10 * 4 + 10 * 4 + 2 * 4  # prototypes, rows of each class, the running accuracy
    assert plain["relative_time"] == 1


def test_same_seeds_same_numbers(tmp_path: Path):
    torch.manual_seed(1)
    first = untimed(run(tmp_path / "a"))
    torch.manual_seed(2)
    assert untimed(run(tmp_path / "b")) == first


def test_weight_zero_is_plain_training(tmp_path: Path):
    """All methods of a seed start from the same weights and draw the same batches."""
    results = run(tmp_path, "--weight", "0")
    plain = [run["accuracy"] for run in results["histories"]["plain"]]
    for method in ("DCP", "DCL"):
        assert [run["accuracy"] for run in results["histories"][method]] == plain


def test_by_default_weight_and_alpha_are_the_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two epochs of several batches each: one batch alone would leave alpha without an effect."""
    small = ("--seeds", "1", "--train-size", "200")
    default = untimed(run(tmp_path / "default", *small))
    other = untimed(run(tmp_path / "other", *small, "--weight", "0.5", "--alpha", "0.1"))
    for method, alpha in (("DCL", "0.99"), ("DCP", "0.97")):
        given = untimed(run(tmp_path / "given", *small, "--weight", "0.1", "--alpha", alpha))
        assert "seeds\nweight 0.1, alpha " + alpha in capsys.readouterr().out
        assert default[method] == given[method] != other[method]


def test_label_smoothing_is_the_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    default = untimed(run(tmp_path / "default"))
    other = untimed(run(tmp_path / "other", "--label-smoothing", "0"))
    assert "label smoothing 0\n" in capsys.readouterr().out
    assert [default[method] == other[method] for method in training.METHODS] == [True, False, True, True]
    assert other["label smoothing"] == other["plain"]


def test_wrong_labels_have_a_row_of_the_companion(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    right = untimed(run(tmp_path / "right"))
    results = run(tmp_path / "wrong", "--wrong-labels", "0.3")
    wrong = untimed(results)
    assert list(wrong) == [*training.METHODS, "DCL's companion"]
    assert all(wrong[method] != right[method] for method in training.METHODS)
    assert wrong["DCL's companion"][0]["accuracy"] != wrong["DCL"][0]["accuracy"]
    printed, errors = capsys.readouterr()
    assert "2 epochs, 2 seeds, 30% of the labels wrong\n" in printed
    assert "\nDCL's companion " in printed
    assert "digits, 30% wrong\n" in errors
    args = arguments.parse(["--wrong-labels", "0.3", "--seeds", "7"])
    assert (args.train_size, args.epochs, args.seeds) == (300, 50, 7)


def test_as_many_labels_are_wrong_in_every_seed():
    labels = torch.arange(200) % 10
    found = [training._with_wrong_labels(labels, 0.3, seed) for seed in range(3)]
    assert [int((one != labels).sum()) for one in found] == [60] * 3
    assert not torch.equal(found[0], found[1])
    assert all(int(one.min()) >= 0 and int(one.max()) <= 9 for one in found)
    assert torch.equal(training._with_wrong_labels(labels, 0.0, 0), labels)


def test_the_penalty_is_the_term_of_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a penalty of zero the methods are plain training, so nothing else pulls."""
    default = untimed(run(tmp_path / "default"))
    for wrapper in (training.DCPOptimizer, training.DCLOptimizer):
        penalty = wrapper.penalty
        monkeypatch.setattr(wrapper, "penalty", lambda *given, penalty=penalty: 0 * penalty(*given))
    without = untimed(run(tmp_path / "without"))
    accuracies = {method: [one["accuracy"] for one in runs] for method, runs in without.items()}
    assert accuracies["DCP"] == accuracies["DCL"] == accuracies["plain"]
    assert accuracies["DCP"] != [one["accuracy"] for one in default["DCP"]]


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
    assert "1 of 2 seeds were finished" in printed
    assert "DCL" in printed
    assert "1 of 2 seeds were finished" in errors
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    assert [len(runs) for runs in results["histories"].values()] == [1, 1, 1, 1]
    assert results["table"][0]["accuracy_error"] is None
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_ctrl_c_before_the_first_seed_is_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    interrupt_in_seed(monkeypatch, 0)
    assert demo.main([*TINY, "--out", str(tmp_path)]) == 130
    printed, errors = capsys.readouterr()
    first, second, *others = printed.split("\n")
    assert first == "digits: 64 training and 597 test images, 2 epochs, 2 seeds"
    assert second == "default weight and alpha; label smoothing 0.4"
    assert not any(others)
    assert LOADING in errors
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
        ["--label-smoothing", "1.1"],
        ["--wrong-labels", "-0.1"],
        ["--epochs", "two"],
        ["--out", __file__],
        ["--device", "gpu7"],
        ["--device", "cuda:99"],
        ["--device", "meta"],
        ["--quick", "--seeds", "0"],
        ["--preset", "paper"],
        ["--unknown"],
        ["--epoch", "1"],
        ["--out", ""],
    ],
)
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--device", "cpu", *flags] if "--out" in flags else ["--out", str(tmp_path), *flags])
    assert stopped.value.code == 2
    usage, _, line = capsys.readouterr().err.rpartition("dcl-demo: error: ")
    assert flags[-2 if flags[-1] == "0" else 0] in line
    assert "usage:" not in usage
    assert line.count("\n") == 1
    assert len(line) < 200
    assert "http" not in line  # of a driver, cut in its middle


def test_without_an_optional_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"dcl-optim\[demo\]"):
        demo.main(["--out", str(tmp_path)])
    assert capsys.readouterr().err.endswith(LOADING)  # before the imports, which take seconds where they do not fail


@pytest.mark.parametrize(
    ("difference", "error", "expected"),
    [
        (0.5, 0.2, "DCL gains +0.50 ± 0.20 points"),
        (-0.5, 0.2, "DCL loses -0.50"),
        (0.4, 0.2, "DCL gains"),
        (0.39, 0.2, "DCL is within noise"),
        (-0.3, 0.2, "DCL is within noise"),
        (0.0, 0.0, "DCL is within noise"),
        (1.0, None, "one seed"),
        (-100.0, 10.0, "loses"),
        (-88.88, 77.77, "within noise"),
        (-100.0, None, "one seed"),
    ],
)
def test_verdict(difference: float, error: float | None, expected: str):
    said = report.verdict(report.Row("DCL", 97.0, error, difference, error, 2.0, 0, 0), 100)
    assert expected in said
    assert len(said) <= WIDTH


@pytest.mark.parametrize(
    ("seeds", "critical"), [(2, 12.706), (3, 4.303), (5, 2.776), (10, 2.262), (30, 2.045), (100, 1.984)]
)
def test_gains_are_what_a_t_test_says(seeds: int, critical: float):
    """The critical values of Student's t, two-sided, 5 %, as in printed tables."""
    for factor, expected in ((1.001, "DCL gains"), (-1.001, "DCL loses"), (0.999, "noise"), (-0.999, "noise")):
        assert expected in report.verdict(report.Row("DCL", 97.0, 1.0, factor * critical, 1.0, 2.0, 0, 0), seeds)


def test_a_quick_run_says_nothing_of_the_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, "--quick", "--epochs", "1")
    said = capsys.readouterr().out
    assert "--quick checks the installation only" in said
    assert "noise" not in said


def test_the_first_line_comes_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    seen: list[str] = []
    train = training.Run.epoch
    monkeypatch.setattr(training.Run, "epoch", lambda self: (seen.append(printed.getvalue()), train(self)))
    run(tmp_path)
    assert seen[0].startswith("digits: 64 training and 597 test images, 2 epochs, 2 seeds\n")


def test_what_will_be_done_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(demo, "make_folder", lambda args: seen.append((said.getvalue(), Path("demo-out").exists())))
    monkeypatch.setattr(demo, "_train", lambda args: ({"plain": []}, False))
    assert demo.main([]) == 0
    plan = arguments.plan(arguments.parse([]))
    assert seen == [(plan, False)]
    assert "10 seeds of 100 epochs, which takes 2 to 4 minutes" in plan
    assert plan.endswith("writes results.json and curves.png to demo-out\n")
    assert max(map(len, plan.splitlines())) <= WIDTH
    Path("demo-out").mkdir()
    Path("demo-out/results.json").touch()
    assert arguments.plan(arguments.parse([])).endswith("to demo-out (over older ones)\n")


def test_the_table_ends_with_where_to_read_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path)
    last = capsys.readouterr().out.split("\n\nWrote")[0].splitlines()[-1]
    assert last == "Other data, other methods: docs/results.md; wrong labels: docs/noisy-labels.md"


def test_without_a_terminal_there_is_a_line_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = iter(range(0, 10**6, 25))  # seconds, an epoch takes 25 of them
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    run(tmp_path, "--epochs", "4")
    lines = capsys.readouterr().err.partition(LOADING)[2].splitlines()
    assert [line.partition(" epochs")[0] for line in lines] == ["dcl-demo: 3 of 8", "dcl-demo: 6 of 8"]
    assert re.fullmatch(r"dcl-demo: 6 of 8 epochs, seed 1, plain [\d.]+, DCP [\d.]+, DCL [\d.]+ %", lines[-1])


def test_the_results_have_their_date(tmp_path: Path):
    date = datetime.fromisoformat(run(tmp_path)["date"])
    assert abs(datetime.now(timezone.utc) - date) < timedelta(hours=1)


def test_the_table_is_of_the_last_epoch_and_of_differences_by_seed():
    def run(*accuracy: float) -> dict:
        return {"accuracy": accuracy, "seconds": [1.0], "diverged": False, "parameters_added": 0, "bytes_added": 0}

    plain, ours = report.summarise({"plain": [run(0.5, 0.4), run(0.6, 0.7)], "DCL": [run(0.9, 0.5), run(0.8, 0.7)]})
    assert (plain.accuracy, ours.accuracy) == pytest.approx((55, 60))
    assert (ours.minus_plain, ours.minus_plain_error) == pytest.approx((5, 5))


def test_the_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch):
    """With the widest numbers: a thousand seeds of a thousand epochs, accuracies of 100 %."""
    drawn, original = io.StringIO(), tqdm.tqdm
    shown = {"file": drawn, "disable": False, "dynamic_ncols": False, "ncols": WIDTH, "mininterval": 0, "total": 10**6}

    class Right:
        def __init__(self, *args: object) -> None:
            self.history = {"accuracy": [1.0]}

        epoch = finish = lambda self: None

    monkeypatch.setattr(tqdm, "tqdm", lambda **options: original(**options | shown))
    monkeypatch.setattr(training, "Run", Right)
    monkeypatch.setattr(training, "load_digits", functools.cache(digits.load_digits))
    list(training.train_seeds(arguments.make_parser().parse_args(["--epochs", "2", "--seeds", "101"])))
    bars = drawn.getvalue().split("\r")[1:-2]  # after them an empty line
    assert len(bars) > 202
    assert {len(bar) for bar in bars} == {WIDTH}
    assert re.fullmatch(r" *0%\|.*\| 202/1000000 \[.*, seed 100, plain 100.0, DCP 100.0, DCL 100.0 %\]", bars[-1])


def histories(**diverged: tuple[bool, ...]) -> dict[str, list[dict]]:
    same = {"accuracy": [0.5], "seconds": [1.0], "parameters_added": 0, "bytes_added": 0}
    return {method: [same | {"diverged": one} for one in runs] for method, runs in diverged.items()}


def test_what_diverged_is_not_compared():
    plain, dcl, dcp = rows = report.summarise(histories(plain=(False, False), DCL=(False, True), DCP=(False, False)))
    assert [row.diverged for row in rows] == [0, 1, 0]
    assert (dcl.minus_plain, dcl.minus_plain_error) == (None, None)
    assert (dcp.minus_plain, plain.minus_plain) == (0, 0)
    assert report.verdict(dcl, 2) == "DCL diverged in 1 of 2 seeds: its loss or logits are not finite."
    assert "+0.00" not in report.format_table([plain, dcl])

    plain, dcl = report.summarise(histories(plain=(True, True), DCL=(False, False)))
    assert dcl.minus_plain is None
    assert "plain diverged in 2 of 2 seeds" in report.verdict(plain, 2)
    assert report.verdict(dcl, 2) == "DCL is not compared with plain, which diverged."


def test_what_is_finite():
    labels = torch.tensor([1, 0])
    for good, value in ((True, 1e38), (False, 3e38), (False, torch.inf), (False, torch.nan)):  # 6e38 overflows
        assert training._finite(torch.tensor([[value, -value], [0.0, 0.0]]), labels) is good
    assert training._finite(torch.tensor([[-torch.inf, 0.0], [0.0, 0.0]]), labels) is False  # its loss is 0 and log 2


def test_a_run_diverges_when_its_last_epoch_is_not_finite():
    args = arguments.make_parser().parse_args(["--epochs", "2"])
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10
    one = training.Run("plain", 0, images, images, args)
    one.epoch()
    assert one.history["diverged"] is False
    with torch.no_grad():
        next(one.model.parameters()).fill_(torch.nan)
    one.epoch()
    history = one.finish()
    assert history["diverged"] is True


@pytest.mark.filterwarnings("ignore:non-finite logits or loss")
def test_divergence_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = run(tmp_path, "--lr", "1e9")
    printed = capsys.readouterr().out
    for method in training.METHODS:
        assert f"{method} diverged in 2 of 2 seeds" in printed
        assert all(history["diverged"] for history in results["histories"][method])
    assert "0.00 points" not in printed
    assert "noise" not in printed
    assert {row["minus_plain"] for row in results["table"]} == {None}


def test_a_reader_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As ``dcl-demo | head -1`` does; the files are there, and the flush at the interpreter's exit does not fail."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert demo.main([*TINY, "--out", str(tmp_path)]) == 141
        monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "curves.png"}


@pytest.mark.parametrize(
    ("flags", "epochs", "seeds"),
    [
        ([], 100, 10),
        (["--quick"], 20, 3),
        (["--quick", "--seeds", "10"], 20, 10),
        (["--epochs", "40", "--quick"], 40, 3),
    ],
)
def test_quick(flags: list[str], epochs: int, seeds: int, tmp_path: Path):
    args = arguments.parse([*flags, "--out", str(tmp_path)])
    assert (args.epochs, args.seeds) == (epochs, seeds)


def test_model_and_images_are_on_the_device(monkeypatch: pytest.MonkeyPatch):
    """Meta tensors stand in for an accelerator's; the command line refuses them, since they hold no values."""
    args = arguments.make_parser().parse_args([])
    args.device = "meta"
    runs = []

    class Made(training.Run):
        def epoch(self) -> None:
            runs.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "Run", Made)
    with pytest.raises(KeyboardInterrupt):
        training.train_seed(0, args, None)
    tensors = [*runs[0].model.parameters(), *runs[0].model.buffers(), *runs[0].train, *runs[0].evaluation]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    """Same weights, same batches; the sums differ in their last bits."""
    on_cpu, on_gpu = (run(tmp_path / device, "--device", device) for device in ("cpu", "cuda"))
    for method, runs in on_gpu["histories"].items():
        assert [one["parameters_added"] for one in runs] == [17754 * (method == "DCL")] * 2
        for ours, theirs in zip(runs, on_cpu["histories"][method], strict=True):
            assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.1)


def test_threads_are_left_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = [5]
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen[-1])
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    results = run(tmp_path, "--seeds", "1", "--epochs", "1")
    assert seen == [5, 1, 5]
    assert results["machine"]["threads"] == 1


def test_as_a_module():
    command = [sys.executable, "-m", "dcl_optim", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == f"dcl-optim {__version__}"


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit, match=r"^0$"):
        demo.main(["--help"])
    text = capsys.readouterr().out
    flags = "--epochs --seeds --train-size --wrong-labels --label-smoothing --alpha --weight --validation --quick"
    for flag in [*flags.split(), "--device", "--out"]:
        assert flag in text
    assert "default: 100" in text
    assert "3 seeds of 20 epochs" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "default: each optimizer's own" in " ".join(text.split())
