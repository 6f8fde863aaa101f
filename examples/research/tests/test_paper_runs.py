"""Runs of the paper's rows: what is checked before, what a signal leaves, what processes share, what is at the end."""

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.research.applications.masked_autoencoder import networks as autoencoders
from examples.research.configuration import Configuration
from examples.research.methods.companion import CompanionPrototype
from examples.research.paper import checks, estimate, runs
from examples.research.paper.command import main
from examples.research.paper.images import load
from examples.research.paper.loop import Signals, Stopped, train
from examples.research.paper.recipes import SETTINGS
from examples.research.paper.rows import Work
from examples.research.paper.session import Session
from examples.research.paper.training import Training
from examples.research.tests import paper_ranks
from examples.research.tests.paper_files import TINY
from tests.helpers import PATIENCE

OURS = SETTINGS["package"]
SMALL = Configuration("cifar100", "cnn-without-norm", "plain", 2, batch_size=4, lr=0.02, augmentation="basic")
WORKS = {
    "plain": Work(SMALL),
    "DCL": Work(replace(SMALL, network="resnet10-xs", method="dcl", options=OURS["dcl"])),
    "DCP": Work(replace(SMALL, network="vit-tiny", optimizer="adamw", lr=1e-3, method="dcp", options=OURS["dcp"])),
    "bagging": Work(replace(SMALL, method="bagging")),
    "snapshot": Work(replace(SMALL, method="snapshot")),
    "SAF": Work(replace(SMALL, method="saf", options={"lag": 1, "start": 1})),
    "FixMatch": Work(
        replace(SMALL, data="cifar10", network="cnn-without-norm", batch_size=2, method="dcl", options=OURS["dcl"]),
        "fixmatch",
        {"labels": 10, "ratio": 2, "threshold": 0.1, "unlabelled_weight": 1.0, "average": 0.5, "steps": 4},
    ),
    "distillation": Work(
        replace(SMALL, network="resnet10-xs", method="dcl", options=OURS["dcl"]),
        "distill",
        {"kind": "KD", "warmup": 1},
        needs=Work(replace(SMALL, network="resnet10-xs"), "distill", {"kind": "plain", "warmup": 1}),
    ),
    "autoencoder": Work(
        replace(SMALL, data="imagenet", optimizer="adamw", method="dcl", options=OURS["dcl"] | {"distance": "squared"}),
        "reconstruct",
        {"mask_ratio": 0.75},
    ),
}


@pytest.fixture
def session(files, tmp_path, monkeypatch):
    monkeypatch.setattr(autoencoders, "SIZE", TINY)
    return Session(torch.device("cpu"), files, tmp_path, random_needs=True)


def made(work, session):
    return Training(work, 0, session, load(work, session, 0))


def flat(tree, name=""):
    """All that is in a state but times, by its place in it."""
    if isinstance(tree, dict):
        return {
            k: v
            for key in tree
            if key not in ("seconds", "waited")
            for k, v in flat(tree[key], f"{name}/{key}").items()
        }
    if isinstance(tree, (list, tuple)):
        return {k: v for number, part in enumerate(tree) for k, v in flat(part, f"{name}/{number}").items()}
    return {name: tree}


def same(one, two):
    one, two = flat(one.state_dict()), flat(two.state_dict())
    assert one.keys() == two.keys()
    return [
        k for k in one if not (torch.equal(one[k], two[k]) if isinstance(one[k], torch.Tensor) else one[k] == two[k])
    ]


@pytest.mark.parametrize("name", WORKS)
def test_a_run_that_a_signal_stops_in_an_epoch_ends_as_one_without(name, session, monkeypatch):
    """SIGTERM after two steps, SIGINT after six of eight; nothing is lost, and all is equal to the last bit."""
    quiet, path = (lambda text: None), session.out / "one.pt"
    whole = made(WORKS[name], session)
    with Signals() as signals:
        train(whole, session.out / "whole.pt", signals, quiet)
    for number, steps in ((signal.SIGTERM, 2), (signal.SIGINT, 6)):
        stopped = made(WORKS[name], session)
        original, done = stopped.steps, []

        def steps_with_a_signal(original=original, done=done, number=number, steps=steps, training=stopped):
            for _ in original():
                if training.epochs * 4 + training.batches == steps:
                    os.kill(os.getpid(), number)
                yield

        monkeypatch.setattr(stopped, "steps", steps_with_a_signal)
        with Signals() as signals, pytest.raises(Stopped, match=number.name):
            train(stopped, path, signals, quiet)
        assert (stopped.epochs, stopped.batches) == divmod(steps, 4)
    goes_on = made(WORKS[name], session)
    said = []
    with Signals() as signals:
        train(goes_on, path, signals, said.append)
    assert said[0] == "goes on after epoch 1 and 2 steps"
    assert same(whole, goes_on) == []
    assert len(set(whole.losses)) == 2
    assert all(math.isfinite(loss) for loss in whole.losses)


def test_a_second_signal_is_not_held_back():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_checkpoint_of_other_processes_is_refused(session):
    one = made(WORKS["plain"], session)
    one.save(session.out / "one.pt")
    two = made(WORKS["plain"], session)
    two.session = replace(session, processes=2)
    with pytest.raises(ValueError, match="is of 1 processes, not 2: start as many"):
        two.resume(session.out / "one.pt")


def test_two_processes_are_one_with_the_same_batches(files, tmp_path):
    """Started as a user does; plain training, SAM, DCL and DCP in float32, without batch norm."""
    (tmp_path / "two").mkdir()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "examples.research.tests.paper_ranks"]
    done = subprocess.run(
        [sys.executable, *command, str(files), str(tmp_path / "two")], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "two" / "result.pt")
    one = paper_ranks.trained(Session(torch.device("cpu"), files, tmp_path / "one"))
    for method in paper_ranks.METHODS:
        torch.testing.assert_close(two[method]["weights"], one[method]["weights"], rtol=1e-4, atol=1e-6)
        assert two[method]["history"] == one[method]["history"]
        assert two[method]["losses"] == pytest.approx(one[method]["losses"], rel=1e-4)
    first = [one[method]["weights"]["0.weight"] for method in paper_ranks.METHODS]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(first, 2))


@pytest.fixture
def priced(monkeypatch):
    monkeypatch.setattr(estimate, "price", lambda work, session: estimate.Price(1e-4, 1000, 1000, 1))


def test_all_that_is_missing_is_in_one_message(tmp_path, capsys, monkeypatch):
    """An empty folder, and an installation without two packages, then without torchvision too."""
    known = importlib.util.find_spec
    hidden = ["timm", "pytorch_optimizer"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else known(name))
    for arguments, wanted in (
        (
            ["main"],
            ("timm", "cifar-100-python is", "tiny-imagenet-200 is", "imagenet is", "resnet18", "shufflenetv2", "curl"),
        ),
        (["augmentations", "imagenet-resnet50-basic"], ("timm",)),
        (["baselines"], ("pytorch_optimizer", "pip install", "--group research", "CIFAR100")),
        (
            ["fine-tuning"],
            ("CUB_200_2011 is", "oxford-iiit-pet is", "food-101 is", "stanford_cars is", "efficientnet_b0"),
        ),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, f"--data-root={tmp_path / 'none'}", f"--out={tmp_path / 'out'}", "--device=cpu"])
        said = capsys.readouterr().err
        assert "nothing was started, for:" in said
        assert [word for word in wanted if word not in said] == []
    hidden.append("torchvision")
    with pytest.raises(SystemExit):
        main(["main", f"--data-root={tmp_path / 'none'}", f"--out={tmp_path / 'out'}", "--device=cpu"])
    said = capsys.readouterr().err
    assert "packages timm, torchvision are not installed" in said
    assert "imagenet is missing" in said
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_folder_of_another_size_a_small_disk_and_a_wrong_network_are_refused(files, session, priced, monkeypatch):
    work = WORKS["plain"]
    assert checks.problems([work], session) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1000))
    assert re.search(r"checkpoints take .* has 0\.0: choose another --out", checks.problems([work], session)[0])
    wrong = Work(replace(SMALL, data="imagenet", network="wrn-28-10"))
    assert "whose stem is for images below 128 pixels; for 224x224" in checks.problems([wrong], session)[0]
    shutil.copytree(files / "cifar-100-python", session.out / "cifar-100-python")
    monkeypatch.setitem(checks.SIZES, "cifar100", (100, 50_000, 10_000))
    assert "has 4 classes, 16 training and 4 test images" in checks.problems([work], session)[0]


def test_data_that_cannot_be_read_is_said_once(files, tmp_path, capsys):
    """CIFAR-100 of three rows in two sizes: missing, then damaged."""
    root = tmp_path / "mine"
    command = ["main", "cifar-100-shufflenetv2", f"--data-root={root}", f"--out={tmp_path / 'out'}", "--device=cpu"]
    for state in ("missing", "damaged"):
        if state == "damaged":
            shutil.copytree(files / "cifar-100-python", root / "cifar-100-python")
            (root / "cifar-100-python" / "train").unlink()
        for more in ([], ["--smoke"]):
            with pytest.raises(SystemExit) as ended:
                main([*command, *more])
            assert ended.value.code == (1 if more else 2)
            shown = "".join(capsys.readouterr())
            assert shown.count(str(root / "cifar-100-python")) == 1
            assert shown.count("from torchvision.datasets import CIFAR100") == 1
            assert f"{root / 'cifar-100-python'} is {state}" in shown
            assert "You can use" not in shown
            assert shown.count(": FAILED, its data cannot be read") == (3 if more else 0)


def test_methods_that_need_one_process_and_batches_that_do_not_divide_are_refused(session):
    two = replace(session, processes=3)
    found = checks.problems([WORKS["bagging"], WORKS["FixMatch"]], two)
    assert found[0] == "bagging, fixmatch: trained by one process alone: start these rows without torchrun"
    assert found[1] == "batches of 2 do not divide among 3 processes: choose --batch-size"
    means = Work(replace(SMALL, method="dcp", batch_size=3, options=SETTINGS["paper"]["dcp"] | {"class_means": True}))
    assert checks.problems([means], two)[0].startswith("class_means: trained by one process alone")
    assert checks.problems([replace(means, configuration=replace(SMALL, batch_size=3))], two) == []


def test_a_small_run_ends_with_the_table_and_is_not_made_again(files, tmp_path, capsys, priced, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["examples.paper", "companion-sizes"])
    command = ["companion-sizes", "accuracy/resnet10-xs", "--epochs=1", "--seeds=2", "--batch-size=8", "--workers=0"]
    command += [f"--data-root={files}", f"--out={tmp_path}", "--device=cpu", "--settings=package"]
    main(command)
    first = capsys.readouterr().out
    assert "2 runs on" in first
    assert re.search(
        r"^2/2 accuracy/resnet10-xs, seed 1: epoch 1/1: test accuracy \d+\.\d\d %, loss .*waiting for images",
        first,
        re.M,
    )
    assert re.search(r"\| Accuracy \| \d+\.\d\d ± \d+\.\d\d, n = 2; paper 80\.2", first)
    found = [json.loads(line) for line in (tmp_path / runs.RESULTS).read_text().splitlines()]
    assert [record["seed"] for record in found] == [0, 1]
    for record in found:
        assert set(record["accuracy"]) == {"model", "companion", "mean of both"}
        assert record["history"] == [record["accuracy"]["model"]]
        assert (record["command"], record["images"]) == ("examples.paper companion-sizes", 16)
        assert torch.__version__.startswith(record["versions"]["torch"])
    assert list((tmp_path / "checkpoints").iterdir()) == []
    main(command)
    again = capsys.readouterr().out
    assert "epoch 1/1" not in again
    assert "Not the paper's settings: settings = package, epochs = 1, batch_size = 8." in again
    assert again == first[first.index("Table 9") :]


def test_what_others_need_is_trained_once_before_them(files, tmp_path, capsys, priced, monkeypatch):
    """The encoder of seed 0, for two seeds of fine-tuning, which begin with its weights."""
    monkeypatch.setattr(autoencoders, "SIZE", TINY)
    command = ["self-supervised", "mae/oxford-pet", "--epochs=1", "--seeds=2", "--batch-size=16", "--workers=0"]
    main([*command, f"--data-root={files}", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    assert re.findall(r"^(\S.*), seed (\d): epoch", shown, re.M) == [
        ("1/3 before: reconstruct", "0"),
        ("2/3 mae/oxford-pet", "0"),
        ("3/3 mae/oxford-pet", "1"),
    ]
    (weights,) = (tmp_path / "weights").iterdir()
    record = json.loads((tmp_path / runs.RESULTS).read_text().splitlines()[0])
    assert (record["accuracy"], weights.stem) == ({}, record["key"])


def test_the_figures_are_drawn(files, tmp_path, capsys, priced):
    command = ["figures", "shufflenetv2", "--epochs=2", "--seeds=1", "--batch-size=8", "--workers=0"]
    main([*command, "--settings=package", f"--data-root={files}", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    assert re.search(r"^\| ShuffleNetV2, DCL \| \d\.\d\d, n = 1 \| \d\.\d\d, n = 1 \|$", shown, re.M)
    drawn = {path.stem for path in Path(tmp_path / "figures").glob("*.png")}
    assert drawn == {"consistency", "perplexity", "non-targets", "variation", "trajectory", "clusters"}


def test_gains_are_of_the_same_seeds(files, tmp_path, capsys, priced):
    """Of two seeds, and of the records' accuracies."""
    rows = ["cifar-100-resnet18/ce", "cifar-100-resnet18/dcl"]
    command = ["main", *rows, "--epochs=1", "--seeds=2", "--batch-size=8", "--workers=0", "--settings=package"]
    main([*command, f"--data-root={files}", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / runs.RESULTS).read_text().splitlines()]
    ce, dcl = (
        {r["seed"]: 100 * r["accuracy"]["model"] for r in found if r["work"]["configuration"]["method"] == method}
        for method in ("plain", "dcl")
    )
    mean = sum(dcl[seed] - ce[seed] for seed in (0, 1)) / 2
    line = rf"^CIFAR-100 ResNet18: DCL - CE = {re.escape(f'{mean:+.2f}')} ± \S+ \(\S+ to \S+\) in 2 paired seeds; the"
    assert re.search(line + r" paper 4\.1", shown, re.M), shown


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_run_that_diverges_ends_with_its_epoch_and_is_named(files, tmp_path, capsys, priced, monkeypatch):
    """DCP with the seed 1, in epoch 2 of 3: two steps an epoch, so that its third penalty is the ninth of both runs."""
    original, calls = CompanionPrototype._penalty, itertools.count(1)

    def penalty(method, z, target):
        return original(method, z, target) * (math.nan if next(calls) == 9 else 1.0)

    monkeypatch.setattr(CompanionPrototype, "_penalty", penalty)
    rows = ["cifar-100-resnet18/ce", "cifar-100-resnet18/dcp"]
    command = ["readings", *rows, "--epochs=3", "--seeds=2", "--batch-size=8", "--workers=0", "--settings=package"]
    command += [f"--data-root={files}", f"--out={tmp_path}", "--device=cpu"]
    main(command)
    shown = capsys.readouterr().out
    assert "cifar-100-resnet18/dcp, seed 1: epoch 2/3: loss nan: diverged, the run ends here\n" in shown
    assert "cifar-100-resnet18/dcp, seed 0: epoch 3/3" in shown
    assert "cifar-100-resnet18/dcp, seed 1: epoch 3/3" not in shown
    assert re.search(r"\| \d+\.\d\d, n = 1; paper 81\.0; seed 1 diverged in epoch 2 \|", shown), shown
    assert re.search(r"CIFAR-100 ResNet18: DCP - CE = \S+ in 1 paired seed; the paper 2\.7", shown), shown
    assert list((tmp_path / "checkpoints").iterdir()) == []
    main(command)
    assert capsys.readouterr().out == shown[shown.index("Equation 5, Section 3.2") :]


def test_a_loss_that_is_not_finite_ends_a_resumed_run_too(session):
    training, path, said = made(WORKS["plain"], session), session.out / "one.pt", []
    training.losses = [1.0, math.inf]
    training.configuration = replace(SMALL, epochs=4)
    training.save(path)
    again = made(WORKS["plain"], session)
    again.configuration = replace(SMALL, epochs=4)
    with Signals() as signals:
        train(again, path, signals, said.append)
    assert said == ["goes on after epoch 2 and 0 steps"]
    assert again.diverged == 2


def test_what_begins_with_a_diverged_run_is_not_trained(files, tmp_path, capsys, priced, monkeypatch):
    monkeypatch.setattr(autoencoders, "SIZE", TINY)
    monkeypatch.setattr(Training, "diverged", property(lambda self: 1 if self.work.task == "reconstruct" else None))
    monkeypatch.setattr(runs, "train", lambda *given: None)
    command = ["self-supervised", "mae/oxford-pet", "--epochs=1", "--seeds=2", "--batch-size=16", "--workers=0"]
    main([*command, f"--data-root={files}", f"--out={tmp_path}", "--device=cpu"])
    shown = capsys.readouterr().out
    for label in ("2/3 mae/oxford-pet, seed 0", "3/3 mae/oxford-pet, seed 1"):
        assert f"{label}: not trained, what it begins with has diverged\n" in shown
    assert "| MAE | what it begins with diverged in epoch 1 |" in shown
    assert not (tmp_path / "weights").exists()
