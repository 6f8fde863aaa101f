"""The Lightning example: its method is the hand-written loop's, and its checkpoints continue a run to the last bit."""

import runpy
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from examples import lightning_module
from tests.helpers import assert_same
from tests.integrations.lightning_modules import QUIET

pytestmark = QUIET


@pytest.fixture
def example(monkeypatch):
    """The example as a module, with a part of its data."""
    train, test = lightning_module.digits()
    part = TensorDataset(*train[:320])
    monkeypatch.setattr(lightning_module, "digits", lambda: (part, test))
    return lightning_module


def run(example, folder, *arguments):
    accuracy = example.main(["--folder", str(folder), *arguments])
    assert 0.0 <= accuracy <= 1.0
    return torch.load(folder / "last.ckpt", weights_only=True)


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
