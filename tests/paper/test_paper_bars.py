"""The bars of the top non-target classes: their lengths against shares and perplexities worked out by hand."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

from examples.paper.bars import perplexity_bars, top_non_target_histogram

NAMES = ["leopard", "lion", "tiger", "road"]
# Top non-target classes of eight leopards and two lions, by method.
CE = [3, 1, 1, 2, 2, 2, 3, 1, 0, 2]
DCL = [2, 2, 2, 2, 2, 2, 1, 1, 2, 2]
LABELS = torch.tensor([0] * 8 + [1] * 2)


def logits_naming(tops: list[int], labels: Tensor = LABELS, classes: int = 4) -> Tensor:
    """Logits of samples that have these top non-target classes, some of them misclassified."""
    logits = torch.zeros(len(tops), classes)
    rows = torch.arange(len(tops))
    logits[rows, labels] = torch.where(rows % 2 == 0, 9.0, 1.0)
    logits[rows, torch.tensor(tops)] = 5.0
    return logits


def both() -> dict[str, Tensor]:
    return {"CE": logits_naming(CE), "DCL": logits_naming(DCL)}


def ticks(axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


def lengths(axes) -> list[list[float]]:
    return [[bar.get_width() for bar in container] for container in axes.containers]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def crowd(classes: int, each: int = 6, methods: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes * each) % classes
    return {f"method {m}": torch.randn(len(labels), classes, generator=generator) for m in range(methods)}, labels


def test_histogram_is_the_shares():
    """Leopards. CE: tiger 3/8, lion 3/8, road 2/8; DCL: tiger 6/8, lion 2/8."""
    figure = top_non_target_histogram(both(), LABELS, 0, NAMES)
    (axes,) = figure.axes
    assert ticks(axes) == ["tiger", "lion", "road"]
    assert lengths(axes) == [[37.5, 37.5, 25.0], [75.0, 25.0, 0.0]]
    assert legend(figure) == ["CE", "DCL"]
    assert figure.get_suptitle() == "Class leopard: 8 samples by top non-target class"
    assert axes.get_xlabel() == "share of samples [%]"


def test_bars_of_a_class_stand_side_by_side():
    (axes,) = top_non_target_histogram(both(), LABELS, 0, NAMES).axes
    assert axes.yaxis_inverted()
    for row in range(3):
        first, second = (container[row] for container in axes.containers)
        assert first.get_y() + first.get_height() == pytest.approx(second.get_y())
        assert second.get_y() == pytest.approx(row)
    colours = [{to_hex(bar.get_facecolor()) for bar in container} for container in axes.containers]
    assert colours == [{"#000000"}, {"#d55e00"}]


def test_histogram_adds_up_what_it_leaves_out():
    (axes,) = top_non_target_histogram(both(), LABELS, 0, NAMES, most=1).axes
    assert ticks(axes) == ["tiger", "2 others"]
    assert lengths(axes) == [[37.5, 62.5], [75.0, 25.0]]
    (axes,) = top_non_target_histogram(both(), LABELS, 0, NAMES, most=2).axes
    assert ticks(axes) == ["tiger", "lion", "1 other"]


def test_one_tensor_needs_no_legend_and_no_names():
    figure = top_non_target_histogram(logits_naming(CE), LABELS, 1)
    assert not figure.legends
    assert ticks(figure.axes[0]) == ["0", "2"]
    assert lengths(figure.axes[0]) == [[50.0, 50.0]]


def test_histogram_counts_as_a_loop_does():
    methods, labels = crowd(10, 30, methods=1)
    logits = methods["method 0"]
    tops = Counter()
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if label == 4:
            tops[max((value, k) for k, value in enumerate(row) if k != 4)[1]] += 1
    (axes,) = top_non_target_histogram(logits, labels, 4, most=10).axes
    drawn = dict(zip(map(int, ticks(axes)), lengths(axes)[0], strict=True))
    assert drawn == pytest.approx({k: 100 * n / 30 for k, n in tops.items()})
    assert lengths(axes)[0] == sorted(drawn.values(), reverse=True)


def test_perplexity_by_hand():
    """CE: (3/8)^(-3/4) (2/8)^(-1/4) for leopards, 2 for lions; DCL: (3/4)^(-3/4) (1/4)^(-1/4) and 1."""
    figure = perplexity_bars(both(), LABELS, NAMES)
    (axes,) = figure.axes
    plain, dcl = 0.375**-0.75 * 0.25**-0.25, 0.75**-0.75 * 0.25**-0.25
    assert ticks(axes) == ["leopard", "lion"]
    assert lengths(axes) == [pytest.approx([plain, 2.0]), pytest.approx([dcl, 1.0])]
    assert legend(figure) == [f"CE, mean {(plain + 2) / 2:.2f}", f"DCL, mean {(dcl + 1) / 2:.2f}"]
    assert figure.get_suptitle() == "Non-target perplexity of 2 classes"


def test_perplexity_names_the_two_most_frequent():
    """Equal counts in the order of the classes; no second where there is none."""
    (axes,) = perplexity_bars(both(), LABELS, NAMES).axes
    texts = [(text.get_text(), to_hex(text.get_color())) for text in axes.texts]
    black, green = "#000000", "#009e73"
    assert texts == [
        *[("lion", black), ("tiger", green), ("leopard", black), ("tiger", green)],
        *[("tiger", black), ("lion", green), ("tiger", black)],
    ]


def test_names_next_to_the_bars_stay_in_the_image():
    figure = perplexity_bars(both(), LABELS, ["a name of a class that is as long as names get"] * 4)
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    second = boxes[1]
    assert second.x0 > boxes[0].x1, "the second name begins where the first ends"


def test_sorted_by_the_first_method():
    methods, labels = crowd(10, 20)
    (axes,) = perplexity_bars(methods, labels).axes
    first, second = lengths(axes)
    assert first == sorted(first, reverse=True)
    assert second != sorted(second, reverse=True)
    (axes,) = perplexity_bars(dict(reversed(methods.items())), labels).axes
    assert lengths(axes)[0] == sorted(second, reverse=True)


@pytest.mark.parametrize(("classes", "columns"), [(25, 1), (26, 2), (100, 4)])
def test_many_classes_stand_in_columns(classes: int, columns: int):
    figure = perplexity_bars(*crowd(classes, 40))
    assert len(figure.axes) == columns
    assert sorted(int(tick) for axes in figure.axes for tick in ticks(axes)) == list(range(classes))
    down = [length for axes in figure.axes for length in lengths(axes)[0]]
    assert down == sorted(down, reverse=True)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert bool(figure.axes[0].texts) == (columns == 1)


@pytest.mark.parametrize("classes", [10, 100])
def test_nothing_lies_on_anything_else(classes: int):
    """Ticks do not touch each other, nor the legend the axes' label."""
    methods, labels = crowd(classes)
    figure = perplexity_bars(methods, labels, ["aquarium_fish"] * classes)
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.get_yticklabels()]
        assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))
        assert axes.xaxis.label.get_window_extent().y0 >= figure.legends[0].get_window_extent().y1
    for left, right in itertools.pairwise(figure.axes):
        assert left.bbox.x1 <= right.get_yticklabels()[0].get_window_extent().x0


def test_more_than_a_hundred_classes_are_drawn_from():
    methods, labels = crowd(120, 2)
    chosen = [{int(tick) for axes in perplexity_bars(methods, labels).axes for tick in ticks(axes)} for _ in "ab"]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 100
    assert max(chosen[0]) >= 100


def test_chosen_classes():
    methods, labels = crowd(30)
    figure = perplexity_bars(methods, labels, classes=[7, 21, 3])
    assert sorted(map(int, ticks(figure.axes[0]))) == [3, 7, 21]
    every = perplexity_bars(methods, labels)
    of_all = {t: n for a in every.axes for t, n in zip(ticks(a), lengths(a)[0], strict=True)}
    assert lengths(figure.axes[0])[0] == [of_all[tick] for tick in ticks(figure.axes[0])]


def test_files(tmp_path: Path):
    histogram = top_non_target_histogram(both(), LABELS, 0, NAMES, title="mine")
    perplexity = perplexity_bars(both(), LABELS, NAMES, title="mine too")
    assert [figure.get_suptitle() for figure in (histogram, perplexity)] == ["mine", "mine too"]
    histogram.savefig(tmp_path / "histogram.png")
    perplexity.savefig(tmp_path / "perplexity.pdf")
    assert (tmp_path / "histogram.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "perplexity.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("draw", [top_non_target_histogram, perplexity_bars])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": {}}, r"logits has the shapes \{\}"),
        ({"logits": {"CE": torch.zeros(10, 4), "DCL": torch.zeros(10, 5)}}, "all of the same"),
        ({"logits": {str(m): torch.zeros(10, 4) for m in range(7)}}, "logits has 7 methods; it must have at most 6"),
        ({"logits": torch.zeros(10, 4, dtype=torch.long)}, "logits has shape"),
        ({"logits": {"CE": torch.zeros(9, 4)}}, r"logits\['CE'\]: labels has shape \(10,\)"),
        ({"labels": LABELS + 3}, r"labels holds 4; it must be in 0\.\.3"),
        ({"class_names": NAMES[:3]}, "class_names has 3 names; it must have 4"),
    ],
)
def test_bad_input(draw, change: dict, message: str):
    arguments = {"logits": both(), "labels": LABELS, **({"class_index": 0} if draw is top_non_target_histogram else {})}
    with pytest.raises(ValueError, match=message):
        draw(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_index": 2}, "class_index is 2; .*no sample"),
        ({"class_index": -1}, "class_index"),
        ({"most": 0}, "most"),
    ],
)
def test_bad_histogram(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        top_non_target_histogram(**({"logits": both(), "labels": LABELS, "class_index": 0} | change))


@pytest.mark.parametrize("classes", [[], [0, 0], [2], [4], [-1]])
def test_bad_classes(classes: list[int]):
    with pytest.raises(ValueError, match=r"classes is \[.*0\.\.3"):
        perplexity_bars(both(), LABELS, classes=classes)


def test_no_samples():
    with pytest.raises(ValueError, match="labels is empty"):
        perplexity_bars(torch.zeros(0, 4), LABELS[:0])


@pytest.mark.parametrize(
    "draw", [lambda: top_non_target_histogram(both(), LABELS, 0), lambda: perplexity_bars(both(), LABELS)]
)
def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dcl-optim\[plots\]"):
        draw()
