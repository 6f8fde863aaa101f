"""Mixed labels and the whole application on a made Fashion-MNIST."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch
import torch.nn.functional as F

from examples.research import records
from examples.research.applications import augmentations
from examples.research.applications.augmentations import APPLICATION, ROWS, main, mixing, step
from examples.research.augmentations import seeded

CPU = torch.device("cpu")


def idx(path, values):
    header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + bytes(values.flatten().tolist())))


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 72), ("t10k", 20)):
        labels = torch.arange(count) % 10
        noise = torch.randint(120, (count, 28, 28), generator=generator)
        idx(tmp_path / f"{name}-images-idx3-ubyte.gz", noise + 12 * labels[:, None, None])
        idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", labels)
    return tmp_path


@pytest.fixture
def trained(folder):
    def score(label, **settings):
        small = {"folder": str(folder), "train_size": 40, "epochs": 2, "batch_size": 20, "part": "train"}
        options = dict(APPLICATION.settings) | small | dict(ROWS[label].options) | settings
        losses = []
        return APPLICATION.train(**options, seed=3, device=CPU, progress=losses.append), losses

    return score


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_labels_are_mixed_as_the_pictures_are(name):
    """Picture i is constant i: its mixture with the one before it says the shares."""
    y = torch.tensor([2, 0, 1, 1])
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    mixed, soft = seeded(mixing(name, 3, 1.0), (x, y), 5)
    own = F.one_hot(y, 3).double()
    mean = mixed.double().mean((1, 2, 3))
    share = 1 - (torch.arange(1, 4.0) - mean[1:])  # of the image's own; the first is mixed with the last
    assert 0.02 < share[0] < 0.98
    torch.testing.assert_close(share, share[:1].expand(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(soft.double(), share[0] * own + (1 - share[0]) * own.roll(1, 0), atol=1e-5, rtol=0)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="mix='cutout' is unknown; choose one of none, mixup, cutmix"):
        mixing("cutout", 3, 1.0)


def test_each_row_is_held_against_the_one_without():
    assert [(label, row.against) for label, row in ROWS.items()] == [
        ("basic", None), ("basic, DCL", "basic"),
        ("TrivialAugment", "basic"), ("TrivialAugment, DCL", "TrivialAugment"),
        ("mixup", "basic"), ("mixup, DCL", "mixup"), ("mixup, DCP", "mixup"),
        ("CutMix", "basic"), ("CutMix, DCL", "CutMix"), ("CutMix, DCP", "CutMix"),
    ]  # fmt: skip
    for row in ROWS.values():
        without = {**row.options, "method": "plain"}
        assert row.options["method"] == "plain" or without == ROWS[row.against].options


@pytest.mark.parametrize("label", ["TrivialAugment, DCL", "mixup, DCL", "CutMix, DCP"])
def test_without_weight_the_rows_are_equal(label, trained):
    """The same initial weights, batches, augmentations and mixtures: with λ = 0 the runs agree to the last bit."""
    assert trained(label, weight=0.0) == trained(ROWS[label].against)


def test_pictures_and_mixtures_do_not_depend_on_the_network(trained, monkeypatch):
    """Other networks draw other numbers for their weights: what is mixed comes from the data's own generator."""
    seen = []
    monkeypatch.setattr(augmentations, "step", lambda *args: seen.append(args[3:]) or step(*args))
    trained("mixup", network="small-cnn")
    trained("mixup", network="small-cnn-half")
    assert len(seen) == 8
    for (x, y), (other_x, other_y) in zip(seen[:4], seen[4:], strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_rows_differ(trained):
    losses = [tuple(trained(label)[1]) for label in ("basic", "basic, DCL", "TrivialAugment", "mixup", "CutMix")]
    assert len(set(losses)) == len(losses)
    assert trained("basic")[1] == list(losses[0])


def test_the_command(folder, tmp_path, capsys):
    small = ["--train-size", "40", "--epochs", "1", "--seeds", "1", "--device", "cpu", "--only", "mixup", "mixup, DCP"]
    main(APPLICATION, "A test.", [*small, "--folder", str(folder), "--results", str(tmp_path)])
    plain, dcp = records.read(tmp_path / "application-augmentations.jsonl")
    assert (plain["label"], dcp["label"]) == ("mixup", "mixup, DCP")
    shown = f"| mixup, DCP | {dcp['score']:.2f} | {dcp['score'] - plain['score']:+.2f} |"
    assert shown in capsys.readouterr().out
