"""What a step sends to the other ranks: calls and bytes, and the table of docs/scale.md."""

from pathlib import Path

import pytest

from benchmarks import ranks
from dcl_optim import DCLOptimizer, DCPOptimizer

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [2, 64])
def test_two_reductions_of_counts_and_sums_and_one_of_the_companions_gradient(number):
    """K classes, rows without a label and rows predicted right; K + 1 rows of K sums."""
    assert ranks.reductions(DCPOptimizer, 7, number)[0] == [4 * (7 + 2), 4 * (7 + 1) * 7]
    sizes, gradient = ranks.reductions(DCLOptimizer, 7, number)
    assert sizes == [gradient] == [4 * (8 * 7 + 7)]


@pytest.mark.parametrize("number", [count for count in ranks.CLASSES if count <= 1_000])
def test_the_table_on_the_page(number):
    assert ranks.row(number) in PAGE.splitlines()


def test_the_last_row_of_the_page_is_that_of_the_formula():
    """10,000 classes take 2 GB."""
    sent = 4 * (10_000 + 2) + 4 * 10_001 * 10_000
    resnet = 4 * (23_508_032 + 2_049 * 10_000)  # its body, and a linear head of 2,048 features
    assert f"| 10,000 | 2 | {sent / 1e6:.0f} | {sent / resnet:.0%}".replace("%", " %") in PAGE
