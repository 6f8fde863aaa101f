"""The training curves: what is drawn, and that the saved file opens."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from PIL import Image

from dcl_optim.plots import training_curves
from dcl_optim.plots.canvas import OTHERS, STYLES, styles


def runs(count: int, epochs: int = 5, gain: float = 0.0) -> list[dict[str, list[float]]]:
    """Run number i gains i times as much."""
    return [{"accuracy": [0.5 + 0.08 * epoch + (0.01 + gain) * run for epoch in range(epochs)]} for run in range(count)]


def test_a_saved_figure_is_an_image(tmp_path: Path):
    path = tmp_path / "curves.png"
    training_curves({"plain": runs(3), "DCL": runs(3)}).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with Image.open(path) as image:
        image.load()
        assert image.size == (1050, 960)


def test_what_is_drawn():
    histories = {"plain": runs(3), "DCP": runs(3, gain=0.02), "DCL": runs(3, gain=-0.01)}
    figure = training_curves(histories, title="digits", split="validation")
    accuracy, gains = figure.axes
    assert len(accuracy.lines) == len(accuracy.collections) == 3
    assert accuracy.get_ylabel() == "validation accuracy [%]"
    assert accuracy.get_xlabel() == "epoch"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["plain", "DCP", "DCL"]
    assert accuracy.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert accuracy.lines[0].get_ydata().tolist() == pytest.approx([51, 59, 67, 75, 83])
    assert figure.get_suptitle().startswith("digits (mean of 3 runs")
    assert gains.get_xlabel() == "seed"
    assert gains.get_ylabel() == "points above plain,\nlast epoch"
    points = {line.get_label(): line.get_ydata() for line in gains.lines if line.get_label() in histories}
    assert points["DCP"].tolist() == pytest.approx([0, 2, 4])
    assert points["DCL"].tolist() == pytest.approx([0, -1, -2])
    assert points.keys() == {"DCP", "DCL"}


def test_seeds_are_named_as_in_the_runs():
    histories = {name: [run | {"seed": 7 + index} for index, run in enumerate(runs(2))] for name in ("plain", "DCP")}
    gains = training_curves(histories).axes[1]
    assert next(line for line in gains.lines if line.get_label() == "DCP").get_xdata() == pytest.approx([7, 8], abs=0.3)


@pytest.mark.parametrize("characters", [3, 17, 30, 60])
def test_the_legend_is_as_wide_as_the_figure_at_most(characters):
    names = [
        f"{index} ResNet-18, {index}2x{index}2, batch {index}28, DCL, λ = 0.{index}, α = 0.6, warmup"[:characters]
        for index in range(6)
    ]
    figure = training_curves({name: [{"accuracy": [0.5, 0.9]}] for name in names})
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0
    assert legend.x1 <= figure.bbox.x1


def test_a_long_title_fits_the_figure():
    figure = training_curves({"plain": runs(3)}, title="a title of more than half a line " * 2)
    figure.canvas.draw()
    extent = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= extent.x0
    assert extent.x1 <= figure.bbox.x1


def test_band_is_one_standard_error():
    """Accuracies 50, 51 and 52 %: standard deviation 1, standard error 1/sqrt(3)."""
    figure = training_curves({"plain": runs(3)})
    heights = figure.axes[0].collections[0].get_paths()[0].vertices
    first = [y for x, y in heights.tolist() if x == 1]
    assert max(first) - 51 == pytest.approx(3**-0.5)
    assert 51 - min(first) == pytest.approx(3**-0.5)


def test_an_epoch_without_a_value_is_a_gap(tmp_path: Path):
    """As where a run has diverged, for all runs or one of them."""
    first, second = runs(2)
    first["accuracy"][1] = first["accuracy"][3] = second["accuracy"][3] = math.nan
    figure = training_curves({"plain": [first, second]})
    figure.savefig(tmp_path / "curves.png")
    drawn = figure.axes[0].lines[0].get_ydata().tolist()
    assert drawn == pytest.approx([50.5, math.nan, 66.5, math.nan, 82.5], nan_ok=True)


@pytest.mark.parametrize(("count", "epochs"), [(1, 1), (1, 2), (2, 1), (1, 6)])
def test_little_to_draw(tmp_path: Path, count: int, epochs: int):
    training_curves({"plain": runs(count, epochs)}).savefig(tmp_path / "curves.png")


def test_global_state_is_left_alone(tmp_path: Path):
    before = "matplotlib.pyplot" in sys.modules
    training_curves({"plain": runs(1)}).savefig(tmp_path / "curves.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(
    "histories", [{}, {"plain": []}, {"plain": runs(1, 0)}, {"plain": runs(1, 2), "DCL": runs(1, 3)}]
)
def test_bad_histories(histories: dict):
    with pytest.raises(ValueError, match="histories has runs of"):
        training_curves(histories)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dcl-optim\[plots\]"):
        training_curves({"plain": runs(1)})


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, name) for name in STYLES),
        *(("CE", "plain"), ("DCPOptimizer", "DCP"), ("DCLOptimizer", "DCL"), ("DCP, λ = 0.1", "DCP")),
        ("label smoothing 0.1", "label smoothing"),
    ],
)
def test_a_method_has_its_style_at_any_place(name: str, method: str):
    for names in ([name], ["mine", name], [name, "mine"]):
        assert styles(names)[name] == STYLES[method]


def test_methods_do_not_share_colors_or_markers():
    found = [*STYLES.values(), *OTHERS]
    assert len({style.color for style in found}) == len({style.marker for style in found}) == len(found)


def test_variants_and_unknown_methods_differ_in_their_lines():
    names = ["DCP", "DCP, λ = 0.1", "DCP, λ = 1", "DCPlus", "CEO"]
    found = styles(names)
    assert {found[name].color for name in names[:3]} == {STYLES["DCP"].color}
    assert [found[name].filled for name in names[:3]] == [True, False, False]
    assert len({found[name].line for name in names[:3]}) == 3
    assert [found[name] for name in names[3:]] == list(OTHERS[:2])


def test_the_curves_have_the_colors_of_their_methods():
    accuracy, gains = training_curves({"plain": runs(2), "DCL": runs(2), "DCP": runs(2)}).axes
    for axes in (accuracy, gains):
        found = {line.get_label(): line.get_color() for line in axes.lines}
        assert {found[method] == STYLES[method].color for method in ("DCL", "DCP")} == {True}
