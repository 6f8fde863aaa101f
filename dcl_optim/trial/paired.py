"""Runs with and without, paired by their seeds: means, differences and whether they may be chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["holm", "mean_and_error", "plus_minus", "probability", "probability_cell"]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Compute the mean and its standard error, which is None for a single value.

    Examples:
        >>> mean_and_error([1.0, 2.0, 3.0])
        (2.0, 0.577...)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def plus_minus(mean: float, error: float | None, sign: str = "", places: int = 2) -> str:
    """Format a mean and its standard error; differences take the sign "+".

    Examples:
        >>> plus_minus(0.5, 0.25, sign="+")
        '+0.50 ± 0.25'
    """
    return f"{mean:{sign}.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def probability(mean: float, error: float | None, runs: int) -> float:
    """Compute the two-sided p of a paired t-test from the mean of the differences and its standard error.

    It is 1 for differences that are all 0, and 0 for others that are all the same.

    Examples:
        >>> round(probability(2.262, 1.0, runs=10), 3)
        0.05
    """
    from scipy.special import stdtr  # Student's distribution function

    if not error:
        return float(mean == 0)
    return float(2 * stdtr(runs - 1, -abs(mean) / error))


def holm(p: Mapping[Any, float]) -> dict[Any, float]:
    """Correct p values for their number (Holm 1979): the chance of one false find among all stays what p says.

    The k-th smallest of n is multiplied by n - k + 1, and none is smaller than one before it.

    Examples:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = largest
    return corrected


def probability_cell(p: float | None) -> str:
    """Format a p value; empty for None.

    Examples:
        >>> probability_cell(0.0123), probability_cell(1e-9)
        ('0.012', '< 0.001')
    """
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
