"""The t-SNE figures: which points are drawn where, in which colours, under which title."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from sklearn.manifold import TSNE
from torch import Tensor

from examples.paper.embeddings import class_embedding, logit_embedding

LABELS = torch.arange(18) % 3
NAMES = ["leopard", "lion", "tiger"]


def clusters(labels: Tensor = LABELS, classes: int = 3, seed: int = 0) -> Tensor:
    """Logits around their class's unit vector."""
    noise = torch.randn(len(labels), classes, generator=torch.Generator().manual_seed(seed))
    return 10 * torch.eye(classes)[labels] + noise


def points(collection) -> np.ndarray:
    return np.asarray(collection.get_offsets())


def hollow_and_filled(axes) -> tuple[list, list]:
    """The classes' markers before and after."""
    hollow = [c for c in axes.collections if to_hex(c.get_facecolor()[0]) == "#ffffff"]
    return hollow, [c for c in axes.collections if c not in hollow]


def by_sample(collections, labels: Tensor = LABELS) -> np.ndarray:
    """The points in the order of the samples."""
    places = np.empty((len(labels), 2))
    for label, collection in zip(labels.unique(), collections, strict=True):
        places[(labels == label).numpy()] = points(collection)
    return places


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def tsne(logits: Tensor) -> np.ndarray:
    perplexity = min(30, (len(logits) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(logits.double().numpy())


# ---- between two epochs ----------------------------------------------------------------------------------------------


def test_both_epochs_in_one_embedding():
    before, after = clusters(), clusters(seed=1)
    (axes,) = logit_embedding(before, after, LABELS).axes
    hollow, filled = hollow_and_filled(axes)
    expected = tsne(torch.cat([before, after]))
    assert np.allclose(by_sample(hollow), expected[:18], atol=1e-3)
    assert np.allclose(by_sample(filled), expected[18:], atol=1e-3)


def test_a_shift_is_seen():
    """Two embeddings, each of its own epoch, would lie on each other."""
    before = clusters()
    (axes,) = logit_embedding(before, before + 100, LABELS).axes
    earlier, later = map(by_sample, hollow_and_filled(axes))
    apart = np.linalg.norm(earlier.mean(0) - later.mean(0))
    assert apart > 2 * max(earlier.std(), later.std())


def test_lines_join_the_same_sample():
    (axes,) = logit_embedding(clusters(), clusters(seed=1), LABELS).axes
    earlier, later = map(by_sample, hollow_and_filled(axes))
    joined = np.array([line.get_xydata() for line in axes.lines])
    assert np.array_equal(joined, np.stack([earlier, later], axis=1))


def test_title_is_the_mean_distance():
    """A third of the samples moves by (3, 4, 0), of length 5, the others stay: d = 5/3."""
    before = clusters()
    after = before + (LABELS == 1)[:, None] * torch.tensor([3.0, 4.0, 0.0])
    figure = logit_embedding({"CE": before, "DCL": before}, {"CE": after, "DCL": before + 0.0}, LABELS)
    assert [axes.get_title() for axes in figure.axes] == ["CE, d = 1.67", "DCL, d = 0"]
    assert logit_embedding(before, after, LABELS).axes[0].get_title() == "d = 1.67"


def test_classes_have_colours_and_names():
    figure = logit_embedding(clusters(), clusters(seed=1), LABELS, NAMES, epochs=("epoch 1", "epoch 2"))
    assert legend(figure) == ["epoch 1", "epoch 2", *NAMES]
    hollow, filled = hollow_and_filled(figure.axes[0])
    colours = [to_hex(c.get_facecolor()[0]) for c in filled]
    assert colours == ["#3f90da", "#ffa90e", "#bd1f01"] == [to_hex(c.get_edgecolor()[0]) for c in hollow]
    handles = figure.legends[0].legend_handles
    assert [to_hex(handle.get_markerfacecolor()) for handle in handles[:2]] == ["#ffffff", "#666666"]
    assert [to_hex(handle.get_color()) for handle in handles[2:]] == colours
    assert [len(points(c)) for c in hollow + filled] == [6] * 6


def test_forty_classes_look_different():
    labels = torch.arange(40)
    figure = class_embedding(clusters(labels, 40), labels, classes=range(40))
    looks = [(to_hex(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in figure.axes[0].collections]
    assert len(set(looks)) == 40
    assert not figure.legends


@pytest.mark.parametrize(("panels", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (4, 2, 2), (5, 2, 3)])
def test_panels(panels: int, rows: int, columns: int):
    labels = LABELS[:4]
    logits = {f"epoch {index}": clusters(labels) for index in range(panels)}
    figure = logit_embedding(logits, logits, labels)
    assert [axes.get_title() for axes in figure.axes] == [f"epoch {index}, d = 0" for index in range(panels)]
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (rows, columns)


@pytest.mark.parametrize("samples", [2, 3, 50])
def test_few_and_many_samples(tmp_path: Path, samples: int):
    labels = torch.arange(samples) % 3
    figure = logit_embedding(clusters(labels), clusters(labels, seed=1), labels, title="mine")
    assert figure.get_suptitle() == "mine"
    figure.savefig(tmp_path / "drift.png")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_each_method_has_a_separate_embedding():
    methods = {"CE": clusters(), "DCL": clusters(seed=1).bfloat16()}
    figure = class_embedding(methods, LABELS, NAMES)
    assert [axes.get_title() for axes in figure.axes] == ["CE", "DCL"]
    assert legend(figure) == NAMES
    for axes, logits in zip(figure.axes, methods.values(), strict=True):
        assert np.allclose(by_sample(axes.collections), tsne(logits), atol=1e-3)


def test_only_the_classes_asked_for():
    logits = clusters()
    figure = class_embedding(logits, LABELS, NAMES, classes=[2, 0])
    assert legend(figure) == ["tiger", "leopard"]
    chosen = LABELS != 1
    tigers, leopards = figure.axes[0].collections
    assert np.allclose(by_sample([leopards, tigers], LABELS[chosen]), tsne(logits[chosen]), atol=1e-3)


def test_ten_of_many_classes():
    labels = torch.arange(60) % 30
    figures = [class_embedding(clusters(labels, 30), labels) for _ in "ab"]
    assert len(figures[0].axes[0].collections) == 10
    assert legend(figures[0]) == legend(figures[1]) == sorted(legend(figures[0]), key=int)
    assert legend(figures[0]) != [str(index) for index in range(10)]


def test_same_image_every_time(tmp_path: Path):
    """More than 500 classes: from there scikit-learn starts at random unless told otherwise."""
    labels, images = torch.arange(40), []
    logits = torch.randn(40, 501, generator=torch.Generator().manual_seed(0))
    for seed in range(2):
        np.random.seed(seed)  # noqa: NPY002 - the global state that scikit-learn draws from by default
        torch.manual_seed(seed)
        class_embedding(logits, labels, classes=range(40)).savefig(tmp_path / f"{seed}.png")
        images.append((tmp_path / f"{seed}.png").read_bytes())
    assert images[0] == images[1]


def test_clusters_stay_clusters():
    labels = torch.arange(120) % 3
    (axes,) = class_embedding(clusters(labels), labels).axes
    places = [points(collection) for collection in axes.collections]
    for own in places:
        centre = own.mean(0)
        others = np.concatenate([other for other in places if other is not own])
        assert np.linalg.norm(own - centre, axis=1).max() < np.linalg.norm(others - centre, axis=1).min()


def test_legend_hides_no_data():
    figure = class_embedding(clusters(), LABELS, ["a long name of a class"] * 3)
    figure.canvas.draw()
    legend, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert legend.y1 <= figure.axes[0].bbox.y0
    assert whole.x0 <= legend.x0
    assert legend.x1 <= whole.x1
    assert whole.y0 <= legend.y0


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (clusters(), clusters()[:9], "after: labels has shape|labels has shape"),
        (clusters(), torch.nn.functional.pad(clusters(), (0, 1)), "the same titles and the same shapes"),
        ({"CE": clusters()}, {"DCL": clusters()}, "before holds .*CE.* after holds .*DCL"),
        (clusters(), clusters() * float("nan"), "not finite"),
        ({"CE": clusters() / 0}, {"CE": clusters()}, "logits of CE of 36 samples are not finite"),
        (torch.ones(18, 3), torch.ones(18, 3), "all the same"),
        ({}, {}, "before has the shapes"),
    ],
)
def test_bad_epochs(before, after, message: str):
    with pytest.raises(ValueError, match=message):
        logit_embedding(before, after, LABELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": [3]}, r"classes is \[3\]"),
        ({"classes": []}, r"classes is \[\]"),
        ({"class_names": NAMES[:2]}, "class_names has 2 names; it must have 3"),
        ({"labels": LABELS + 1}, "labels holds 3"),
        ({"logits": {}}, "logits has the shapes"),
        ({"logits": clusters()[:1], "labels": LABELS[:1]}, "of 1 samples are not finite or all the same"),
    ],
)
def test_bad_classes(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        class_embedding(**({"logits": clusters(), "labels": LABELS} | change))


@pytest.mark.parametrize("module", ["sklearn.manifold", "threadpoolctl", "matplotlib.figure"])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, module: str):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"dcl-optim\[(paper|plots)\]"):
        class_embedding(clusters(), LABELS)
