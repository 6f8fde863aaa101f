"""Schedules: values by hand, ranges, and how they show."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from dcl_optim import LinearWarmup, RunningAverage
from dcl_optim.schedules import Checked


def test_running_average():
    """Folding x_t in with alpha_t = (t-1)/t is the mean of all x."""
    values, mean = [3.0, 5.0, 10.0, 2.0], 0.0
    for t, value in enumerate(values, start=1):
        alpha = RunningAverage()(t)
        mean = alpha * mean + (1 - alpha) * value
    assert mean == pytest.approx(5.0)


def test_linear_warmup():
    assert [LinearWarmup(2.0, steps=4)(t) for t in (1, 2, 3, 4, 5, 1000)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("value", "steps", "message"),
    [(-1.0, 3, "value=-1.0"), (math.nan, 3, "value=nan"), (math.inf, 3, "value=inf"), (1.0, 0, "steps=0 must be")],
)
def test_bad_ramps(value, steps, message):
    with pytest.raises(ValueError, match=message):
        LinearWarmup(value, steps)


def test_numbers_of_any_library_and_callables():
    assert Checked(np.float32(0.5), "alpha", upper=1.0)(7) == 0.5
    assert Checked(lambda t: t / 10, "alpha", upper=1.0)(7) == 0.7


def test_schedules_pickle_and_show():
    schedule = Checked(LinearWarmup(1.0, steps=10), "weight")
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert str(schedule) == "LinearWarmup(value=1.0, steps=10)"
    assert str(Checked(0.25, "weight")) == "0.25"
