"""The figures' frame: a style for each method, a legend that fits, no global state."""

from __future__ import annotations

import sys

import pytest

from examples.research.canvas import OTHERS, STYLES, finish, new_figure, styles


def drawn(names, title="digits"):
    """A figure with a curve for each name, finished."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name in names:
        axes.plot([1, 2], [0.5, 0.9], label=name)
    return finish(figure, title, *axes.get_legend_handles_labels())


@pytest.mark.parametrize("characters", [3, 17, 30, 60])
def test_the_legend_is_as_wide_as_the_figure_at_most(characters):
    names = [
        f"{index} ResNet-18, {index}2x{index}2, batch {index}28, DCL, λ = 0.{index}, α = 0.6, warmup"[:characters]
        for index in range(6)
    ]
    figure = drawn(names)
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0
    assert legend.x1 <= figure.bbox.x1


def test_global_state_is_left_alone(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    drawn(["plain"]).savefig(tmp_path / "curves.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dcl-optim\[trial\]"):
        new_figure(7, 4)


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
