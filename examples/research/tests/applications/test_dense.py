"""Scenes pixel by pixel, the score by scikit-learn, VOC's format, and the whole application."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import jaccard_score
from torch import nn

from examples.research import records
from examples.research.applications import scenes
from examples.research.applications.comparison import main
from examples.research.applications.dense import APPLICATION, ROWS, UNet, build, logits, mean_intersection_over_union
from examples.research.datasets import load

CPU = torch.device("cpu")
SMALL = {"data": "digits", "width": 2, "train_size": 40, "epochs": 2, "batch_size": 20}


def trained(label, **settings):
    options = dict(APPLICATION.settings) | SMALL | {"part": "train"} | settings
    texts = []
    return APPLICATION.train(**options | dict(ROWS[label].options), seed=1, device=CPU, progress=texts.append), texts


@pytest.fixture(autouse=True)
def few_scenes(monkeypatch):
    monkeypatch.setattr(scenes, "HELD_OUT", 10)


def test_scenes_pixel_by_pixel(monkeypatch):
    """Two articles of 2x2 with a hole each: a twin that asks every pixel which article covered it last."""
    monkeypatch.setattr(scenes, "NOISE", 0.0)
    images = torch.tensor([[[[1.0, 0.6], [0.0, 0.8]]], [[[0.4, 0.0], [0.2, 0.05]]]])
    x, y = scenes.compose(images, torch.tensor([4, 7]), 50, 3, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(2, (50, 3), generator=generator)
    corners = torch.randint(3, (50, 3, 2), generator=generator)
    for scene in range(50):
        for row in range(4):
            for column in range(4):
                expected = (0.0, 0)
                for number, (top, left) in zip(chosen[scene], corners[scene], strict=True):
                    inside = 0 <= row - top < 2 and 0 <= column - left < 2
                    value = images[number, 0, row - top, column - left] if inside else 0.0
                    expected = (float(value), (5, 8)[number]) if value > 0.1 else expected
                assert (x[scene, 0, row, column], y[scene, row, column]) == (round(255 * expected[0]), expected[1])


def test_a_part_has_its_own_articles_only():
    found = scenes.read("digits", train_size=30, articles=1)
    again = scenes.read("digits", train_size=30, articles=1)
    assert found.classes == 11
    for part in ("train", "validation", "test"):
        x, y = found.parts[part]
        assert len(x) == {"train": 30, "validation": 10, "test": 20}[part]
        assert x.shape[1:] == (1, 16, 16)
        assert torch.equal(x, again.parts[part][0])
        articles = torch.cat([images for images, _ in load("digits").fixed(part)])[:, 0]
        inks = articles > articles.min() + 0.1 * (articles.max() - articles.min())
        shapes = {str(ink.nonzero().tolist()) for ink in inks}
        corners = torch.cartesian_prod(torch.arange(9), torch.arange(9))
        for labels in y:
            places = (labels > 0).nonzero()
            assert shapes & {str((places - corner).tolist()) for corner in corners}


def test_the_score_is_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    labels, predicted = torch.randint(4, (2, 3, 8, 8), generator=generator)
    labels[labels == 3] = 2
    labels[:, :2] = scenes.IGNORED
    kept = labels != scenes.IGNORED
    expected = jaccard_score(labels[kept], predicted[kept], labels=[0, 1, 2], average="macro")
    assert mean_intersection_over_union(predicted, labels, 5) == pytest.approx(expected, rel=1e-12)


def test_the_network_sees_all_of_its_levels():
    torch.manual_seed(0)
    model = UNet(2, 5, 3)
    z = model(torch.randn(2, 2, 12, 8))
    assert z.shape == (2, 5, 12, 8)
    z.square().sum().backward()
    for weight in (parameter for parameter in model.parameters() if parameter.ndim == 4):
        assert (weight.grad.abs().sum((0, 2, 3)) > 0).all()  # what each channel that comes in is worth


def test_torchvisions_networks_by_name():
    model = build("lraspp_mobilenet_v3_large", 3, 4, 0).eval()
    with torch.no_grad():
        assert logits(model, torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, 4, 32, 32)
    with pytest.raises(ValueError, match="takes 3 channels, and these images have 1"):
        build("fcn_resnet50", 1, 4, 0)
    with pytest.raises(ValueError, match="network='resnet18' is unknown; choose one of unet, deeplabv3"):
        build("resnet18", 3, 4, 0)


@pytest.fixture
def voc(tmp_path):
    """VOC's folders: jpg images, masks with a palette, lists of names. The dark left of each is of class 15."""
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True)
    for number in range(10):
        pixels = np.full((20, 30, 3), 255 - 10 * number, np.uint8)
        pixels[:, :16] = 10 * number
        mask = np.zeros((20, 30), np.uint8)
        mask[:, :16], mask[:, 16:19] = 15, 255
        Image.fromarray(pixels).save(root / "JPEGImages" / f"{number}.jpg")
        picture = Image.frombytes("P", (30, 20), mask.tobytes())
        picture.putpalette([value for color in range(256) for value in (color, 0, 255 - color)])
        picture.save(root / "SegmentationClass" / f"{number}.png")
    lists = root / "ImageSets" / "Segmentation"
    (lists / "train.txt").write_text("".join(f"{number}\n" for number in range(9)))
    (lists / "val.txt").write_text("9\n")
    return tmp_path


def test_voc(voc):
    found = scenes.read("voc", folder=str(voc), train_size=5, size=20)
    colors = {part: x[:, 0, 0, 0].tolist() for part, (x, _) in found.parts.items()}
    assert found.classes == 21
    assert colors == {"train": [10, 20, 30, 40, 50], "validation": [0, 80], "test": [90]}
    x, y = found.parts["train"]
    assert (x.shape, y.shape, x.dtype) == ((5, 3, 20, 20), (5, 20, 20), torch.uint8)
    assert y[3].unique().tolist() == [0, 15, 255]
    assert y[:, :, :11].unique().tolist() == [15]
    assert y[:, :, 13:].unique().tolist() == [0]


def test_voc_trains_and_its_borders_count_for_nothing(voc):
    settings = {"data": "voc", "folder": str(voc), "size": 16, "batch_size": 4, "part": "test"}
    assert trained("DCP", **settings, width=4, epochs=30, lr=1e-2)[0] > 80


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="VOCdevkit/VOC2012 must be in it"):
        scenes.read("voc", folder=str(tmp_path))
    with pytest.raises(
        ValueError, match="data='coco' is unknown; choose one of digits, fashion-mnist, noto-scripts, voc"
    ):
        scenes.read("coco")
    with pytest.raises(ValueError, match="train_size=0 must be at least 2"):
        scenes.read("digits", train_size=0)


def test_without_weight_the_rows_are_equal():
    plain = trained("plain")
    assert plain == trained("plain") == trained("DCL", weight=0.0) == trained("DCP", weight=0.0)
    assert len({tuple(trained(label, weight=1e3)[1]) for label in ROWS}) == 3


def test_the_command(tmp_path, capsys):
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    main(APPLICATION, "A test.", [*small, "--seeds", "1", "--device", "cpu", "--results", str(tmp_path)])
    scores = [record["score"] for record in records.read(tmp_path / "application-dense.jsonl")]
    assert len(scores) == 3
    assert f"| DCL | {scores[1]:.2f} | {scores[1] - scores[0]:+.2f} |" in capsys.readouterr().out


def test_bytes_become_numbers_from_0_to_1():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    assert F.l1_loss(logits(nn.Identity(), x).flatten(), torch.tensor([0.0, 0.2, 1.0])) < 1e-6
