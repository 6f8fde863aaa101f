"""The example of image classification: it learns, and its checkpoints continue a run to the last bit."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import TensorDataset

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples import image_classification as script
from tests.helpers import assert_same, cells
from tests.project.test_own_script import execute


@pytest.mark.parametrize("method", cells(["plain", "dcl", "dcp"], "dcl"))
def test_it_learns_digits(tmp_path, capsys, method):
    path = tmp_path / "folder" / "run.pt"
    arguments = ["--method", method, "--epochs", "3", "--device", "cpu", "--checkpoint", str(path)]
    script.main(arguments)
    *_, (epoch, accuracy) = re.findall(r"^epoch (\d): test accuracy (.*) %$", capsys.readouterr().out, re.MULTILINE)
    assert (epoch, float(accuracy) > 80) == ("3", True)
    assert torch.load(path, weights_only=True)["epoch"] == 3
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"], "no temporary file stays behind"


def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_one(tmp_path):
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


@pytest.mark.parametrize("method", ["dcl", "dcp"])
def test_the_papers_recipe_trains_images_of_ones_own(tmp_path, capsys, method):
    """Images of 64 pixels in three classes, and the paper's settings."""
    for part, count in (("train", 8), ("test", 2)):
        for label, color in (("black", 0), ("gray", 128), ("white", 255)):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (64, 64), (color, color, number))
                image.save(tmp_path / part / label / f"{number}.png")
    given = ["--paper", "--method", method, "--images", str(tmp_path), "--epochs=1", "--device=cpu"]
    script.main([*given, "--checkpoint", str(tmp_path / "run.pt")])
    assert re.search(r"^epoch 1: test accuracy \d+\.\d\d %$", capsys.readouterr().out, re.MULTILINE)
    run = script.Run(script.parse(given), script.folders(tmp_path)[0], 3)
    more = {"update": "batch"} if method == "dcp" else {}
    kind = {"dcl": DCLOptimizer, "dcp": DCPOptimizer}[method]
    wanted = kind(run.optimizer.base, run.model, weight=1.0, alpha=0.6, distance="squared", **more)
    assert repr(run.optimizer) == repr(wanted)
    assert isinstance(run.model, torch.nn.Sequential)
    x, y = next(iter(torch.utils.data.DataLoader(script.folders(tmp_path)[0], 24)))
    assert (x.shape, y.tolist()) == ((24, 3, 32, 32), [0] * 8 + [1] * 8 + [2] * 8)
    normal = run.model[0](x)
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3)), torch.ones(3))


def test_the_papers_batches_are_crops_and_mirror_images():
    """Of one image all 9 x 9 crops with a border of 4, and their mirror images."""
    image = torch.rand(1, 32, 32) + 0.5
    padded = F.pad(image, (4,) * 4)
    crops = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
    crops += [crop.flip(-1) for crop in crops]
    known = {crop.numpy().tobytes() for crop in crops}
    x, y = script.crops_and_mirrors([(image, 3)] * 900)
    found = {one.numpy().tobytes() for one in x}
    assert found <= known
    assert len(found) > 0.9 * len(known) == 0.9 * 162
    assert y.tolist() == [3] * 900


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
