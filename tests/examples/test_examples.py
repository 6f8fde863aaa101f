"""The examples run as a reader would run them, and their checkpoints continue a run to the last bit."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples import image_classification
from tests.helpers import assert_same, cells
from tests.project.test_minimal_example import execute

FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


@pytest.fixture
def script() -> Iterator[ModuleType]:
    """The example as a module; what it sets of torch is put back."""
    before = torch.backends.cudnn.deterministic
    yield image_classification
    torch.backends.cudnn.deterministic = before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes that `execute` starts: sums split over another number of threads round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + bytes(values.flatten().tolist())))


@pytest.fixture
def fashion(tmp_path) -> Path:
    """Forty and twenty images in files of the true format; the label is the bright row."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for (images, labels), count in zip((FILES[:2], FILES[2:]), (40, 20), strict=True):
        y = torch.arange(count) % 10
        x = torch.randint(0, 20, (count, 28, 28), generator=torch.Generator().manual_seed(count))
        x[torch.arange(count), 2 * y + 4] = 255
        write_idx(folder / f"{images}-ubyte.gz", x)
        write_idx(folder / f"{labels}-ubyte.gz", y)
    return folder


@pytest.mark.parametrize("method", cells(["plain", "dcl", "dcp"], "dcl"))
def test_image_classification_learns_digits(script, tmp_path, capsys, method):
    path = tmp_path / "run.pt"
    script.main(["--method", method, "--epochs", "2", "--device", "cpu", "--checkpoint", str(path)])
    result = json.loads(capsys.readouterr().out)
    assert result["test_accuracy"] > 0.8
    assert (result["method"], result["epoch"], result["dataset"]) == (method, 2, "digits")
    assert torch.load(path, weights_only=True)["epoch"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"], "no temporary file stays behind"


def test_resume_in_a_new_process_is_bit_identical(script, tmp_path, one_thread):
    common = ["--method=dcl", "--epochs=3", "--train-size=200", "--device=cpu", "--batch-size=64"]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    script.main([*common, "--checkpoint", str(whole)])
    script.main([*common, "--checkpoint", str(parts), "--stop-after", "1"])
    assert torch.load(parts, weights_only=True)["epoch"] == 1
    execute("-m", "examples.image_classification", *common, "--resume", parts)
    expected = torch.load(whole, weights_only=True)
    assert expected["epoch"] == 3
    assert "dcl_optim.DCLOptimizer" in expected["optimizer"]
    assert_same(torch.load(parts, weights_only=True), expected)


@pytest.mark.parametrize(
    ("method", "extra"),
    cells(product(["plain", "dcl", "dcp"], [(), ("--amp",)]), ("dcl", ("--amp",)), ("dcp", ())),
)
def test_resume_with_augmentation(script, fashion, tmp_path, capsys, method, extra):
    """Augmentation and dropout draw at random, so a stream that is not restored would show."""
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    common = f"--dataset fashion-mnist --data {fashion} --method {method} --epochs 3 --batch-size 16 --device cpu"
    arguments = [*common.split(), *extra]
    script.main([*arguments, "--checkpoint", str(whole)])
    script.main([*arguments, "--checkpoint", str(parts), "--stop-after", "1"])
    script.main([*arguments, "--resume", str(parts)])
    assert_same(torch.load(parts, weights_only=True), torch.load(whole, weights_only=True))
    first, stopped, resumed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert stopped["epoch"] == 1
    assert resumed | {"checkpoint": ""} == first | {"checkpoint": ""}


def test_the_defaults_are_the_wrappers_own(script):
    options = script.build_parser().parse_args(["--device", "cpu"])
    assert options.method == "dcp"
    for method, kind in (("dcl", DCLOptimizer), ("dcp", DCPOptimizer)):
        options.method = method
        run = script.Run(options, script.data.digits().head(64))
        assert repr(run.optimizer) == repr(kind(run.optimizer.base, run.model))


def test_resnet18(script, fashion, tmp_path, capsys):

    arguments = f"--dataset fashion-mnist --data {fashion} --model resnet18 --epochs 1 --batch-size 4 --train-size 5"
    script.main([*arguments.split(), "--device", "cpu", "--checkpoint", str(tmp_path / "run.pt")])
    assert json.loads(capsys.readouterr().out)["model"] == "resnet18"


def test_resume_refuses_another_run(script, tmp_path, capsys):
    path = tmp_path / "run.pt"
    common = ["--epochs", "1", "--train-size", "64", "--device", "cpu"]
    script.main([*common, "--checkpoint", str(path)])
    for changed, message in ((["--method", "dcl"], "method=dcp"), (["--lr", "0.2"], "lr=0.1")):
        with pytest.raises(SystemExit):
            script.main([*common, *changed, "--resume", str(path)])
        assert message in capsys.readouterr().err
    for content in (b"half a checkpoint", b"", b"\x80\x02.", path.read_bytes()[:-100]):
        path.write_bytes(content)
        with pytest.raises(SystemExit):
            script.main([*common, "--resume", str(path)])
        assert "is no checkpoint" in capsys.readouterr().err


def test_fashion_mnist_files(script, fashion):
    images = script.data.fashion_mnist(fashion)
    assert images.x_train.shape == (40, 1, 28, 28)
    assert images.x_test.shape == (20, 1, 28, 28)
    assert images.y_train.tolist() == [*range(10)] * 4
    torch.testing.assert_close(images.x_train.mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(images.x_train.std(), torch.tensor(1.0), rtol=0, atol=1e-5)
    raw = script.data.read_idx(fashion / "train-images-idx3-ubyte.gz")
    assert raw.dtype == torch.uint8
    assert (raw[3, 2 * 3 + 4] == 255).all(), "the rows of an image are the file's rows"
    assert (images.x_train[3, 0].argmax(0) == 10).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "dataset-fashion-mnist"),
        (b"not gzip", "cannot read"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x02\x01\x02")[:-9], "cannot read"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\x01"), "not an idx file of unsigned bytes"),
        (gzip.compress(b"\0\0\x08"), "not an idx file"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x03\x01\x02"), "says it holds"),
    ],
    ids=["missing", "no gzip", "cut off", "floats", "no header", "too short"],
)
def test_broken_idx_files(script, tmp_path, content, message):
    path = tmp_path / "labels.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(script.data.DataError, match=message):
        script.data.read_idx(path)


def test_labels_of_another_number_than_images(script, fashion):
    write_idx(fashion / f"{FILES[1]}-ubyte.gz", torch.zeros(39, dtype=torch.long))
    with pytest.raises(script.data.DataError, match="training files do not match"):
        script.data.fashion_mnist(fashion)


def test_crop_and_flip_moves_and_mirrors_whole_pictures(script):
    x = torch.full((512, 1, 6, 6), -1.0)
    x[:, 0, 2, 3] = 1.0
    x[:, 0, 2, 4] = 2.0
    out = script.data.crop_and_flip(x, torch.Generator().manual_seed(0), padding=1)
    assert out.shape == x.shape
    places = set()
    for picture in out[:, 0]:
        (row, column), (next_row, next_column) = (divmod(int((picture == v).flatten().nonzero()), 6) for v in (1, 2))
        assert next_row == row
        places.add((row, column, next_column - column))
    assert places == {(r, c, d) for r in (1, 2, 3) for c, d in [(2, 1), (3, 1), (4, 1), (1, -1), (2, -1), (3, -1)]}
    assert ((out == -1).sum((1, 2, 3)) == 34).all(), "the frame is as dark as the images' darkest"


def test_a_lone_last_sample_is_left_out_and_no_other(script):
    for count, batches in ((33, 2), (34, 3), (32, 2)):
        images = script.data.Images(
            torch.zeros(count, 1, 4, 4), torch.zeros(count), torch.zeros(0), torch.zeros(0), False
        )
        loader = script.data.training_loader(images, 16, torch.Generator().manual_seed(0))
        assert len(list(loader)) == batches


def test_an_interrupted_save_leaves_the_old_checkpoint(script, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    script.save_atomically({"epoch": 1}, path)

    def dies(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        script.save_atomically({"epoch": 2}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            "--dataset mnist",
            "--model vgg",
            "--method sam",
            "--device abacus",
            "--unknown 1",
            "--lr nan",
            "--alpha 1.5",
        ),
        *("--epochs 0", "--batch-size 1", "--train-size 99999", "--data /tmp", "--resume /nowhere/run.pt"),
        "--dataset fashion-mnist --data /nowhere",
    ],
)
def test_wrong_arguments_are_argparse_errors(script, capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        script.main(["--device", "cpu", *arguments.split()])
    assert raised.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_tensorboard(script, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "board"
    arguments = ["--epochs", "1", "--train-size", "64", "--device", "cpu", "--checkpoint", str(tmp_path / "run.pt")]
    arguments += ["--tensorboard", str(folder)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not folder.exists()


def test_scalars_reach_the_writer(script, tmp_path, capsys):
    class Writer:
        seen: list[tuple[str, int]] = []  # noqa: RUF012

        def add_scalar(self, name, value, step):
            self.seen.append((name, step))

    options = script.build_parser().parse_args(["--epochs", "2", "--device", "cpu"])
    run = script.Run(options, script.data.digits().head(64))
    script.train(run, tmp_path / "run.pt", Writer())
    assert Writer.seen == [(name, epoch) for epoch in (1, 2) for name in ("loss", "accuracy", "lr")]


def test_logging_curves_draws_each_run(tmp_path):
    printed = execute("-m", "examples.logging_curves", "--epochs", "2", "--out", tmp_path / "logging.png")
    keys = {line.partition("dcl/")[2].split()[0]: float(line.split()[-1]) for line in printed.splitlines()}
    assert keys.keys() == {"penalty", "agreement", "prototype_norm"}
    assert 0.1 < keys["agreement"] <= 1  # above chance; the companion is slow
    assert (tmp_path / "logging.png").read_bytes().startswith(b"\x89PNG")
