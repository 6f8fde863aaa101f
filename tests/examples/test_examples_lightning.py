"""The Lightning example: its method is the hand-written loop's, and its checkpoints continue a run to the last bit."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dcl_optim import DCPOptimizer
from examples import lightning_module
from tests.helpers import assert_same
from tests.integrations.lightning_modules import QUIET

pytestmark = QUIET


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    """The example as a module, with a part of its data."""
    train, test = lightning_module.digits()
    part = TensorDataset(*train[:320])
    monkeypatch.setattr(lightning_module, "digits", lambda: (part, test))
    return lightning_module


def run(example: ModuleType, folder: Path, *arguments: str) -> dict:
    accuracy = example.main(["--folder", str(folder), *arguments])
    assert 0.0 <= accuracy <= 1.0
    return torch.load(folder / "last.ckpt", weights_only=True)


def by_hand(example: ModuleType, epochs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training without Lightning."""
    torch.manual_seed(0)
    data = example.digits()[0]
    counts = torch.stack([label for _, label in data]).bincount()
    weights = len(data) / (10 * counts)
    net = example.Digits(epochs, weights).net
    optimizer = DCPOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loader = example.training_loader(data)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            z = net(x)
            (F.cross_entropy(z, y, weight=weights) + optimizer.penalty(z, y)).backward()
            optimizer.step()
        scheduler.step()
    return net, optimizer


def test_it_is_the_hand_written_loop(example, tmp_path):
    saved = run(example, tmp_path, "--epochs", "3")
    net, optimizer = by_hand(example, 3)
    saved["state_dict"].pop("criterion.weight")
    assert_same({f"net.{name}": value for name, value in net.state_dict().items()}, saved["state_dict"])
    assert_same(saved["optimizer_states"], [optimizer.state_dict()])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_is_the_uninterrupted_run(example, tmp_path):
    arguments = ["--epochs", "4"]
    whole = run(example, tmp_path / "whole", *arguments)
    half = run(example, tmp_path / "half", *arguments, "--stop-after", "2")
    assert half["epoch"] == 1
    resumed = run(example, tmp_path / "half", *arguments, "--resume", str(tmp_path / "half" / "last.ckpt"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(whole[part], resumed[part])
    assert not torch.equal(half["state_dict"]["net.0.weight"], whole["state_dict"]["net.0.weight"])


def test_the_script_runs_as_a_reader_would_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_module.py", "--epochs", "3", "--folder", str(tmp_path)])
    runpy.run_path(lightning_module.__file__, run_name="__main__")
    name, accuracy = capsys.readouterr().out.rsplit(maxsplit=1)
    assert name == "test accuracy"
    assert float(accuracy) > 0.9
    assert (tmp_path / "last.ckpt").exists()


def test_the_figures_of_each_epoch_are_logged(example, tmp_path):
    run(example, tmp_path / "run", "--epochs", "2")
    with (tmp_path / "run-logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_epochs = [row for row in rows if row["dcl/penalty"]]
    assert [float(row["dcl/step"]) for row in of_epochs] == [5.0, 10.0]
    assert all(float(row["dcl/penalty"]) > 0 for row in of_epochs)
    assert all(float(row["dcl/skipped"]) == 0 for row in of_epochs)
    assert any(row["test/accuracy"] for row in rows)
