"""The example of image classification: it learns, and its checkpoints continue a run to the last bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples import image_classification as script
from tests.helpers import assert_same, cells
from tests.project.test_own_script import execute


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes that `execute` starts: sums split over another number of threads round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", cells(["plain", "dcl", "dcp"], "dcl"))
def test_it_learns_digits(tmp_path, capsys, method):
    path = tmp_path / "folder" / "run.pt"
    arguments = ["--method", method, "--epochs", "3", "--device", "cpu", "--checkpoint", str(path)]
    script.main(arguments)
    *_, (epoch, accuracy) = re.findall(r"^epoch (\d): test accuracy (.*) %$", capsys.readouterr().out, re.MULTILINE)
    assert (epoch, float(accuracy) > 80) == ("3", True)
    assert torch.load(path, weights_only=True)["epoch"] == 3
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"], "no temporary file stays behind"


def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_one(tmp_path, one_thread):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    common = ["--method=dcl", "--epochs=3", "--device=cpu"]
    script.main([*common, "--checkpoint", str(whole)])
    script.main([*common, "--checkpoint", str(parts), "--stop-after", "1"])
    assert torch.load(parts, weights_only=True)["epoch"] == 1
    execute("-m", "examples.image_classification", *common, "--resume", "--checkpoint", parts)
    expected = torch.load(whole, weights_only=True)
    assert expected["epoch"] == 3
    assert "dcl_optim.DCLOptimizer" in expected["optimizer"]
    assert_same(torch.load(parts, weights_only=True), expected)


@pytest.mark.parametrize(("method", "kind"), [("dcl", DCLOptimizer), ("dcp", DCPOptimizer)])
def test_the_settings_are_the_wrappers_defaults(method, kind):
    run = script.Run(script.parse(["--method", method, "--device", "cpu"]), script.digits()[0])
    assert repr(run.optimizer) == repr(kind(run.optimizer.base, run.model))


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    data = TensorDataset(torch.randn(128, 1, 4, 4), torch.arange(128) % 10)
    run = script.Run(script.parse(["--device", "cpu"]), data)
    run.save(path)

    def dies(state, file):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    run.train_epoch()
    with pytest.raises(KeyboardInterrupt):
        run.save(path)
    assert torch.load(path, weights_only=True)["epoch"] == 0
