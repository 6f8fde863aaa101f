"""Schedules: values by hand, ranges, and how they show."""

from __future__ import annotations

import math
import pickle

import numpy as np

from dcl_optim.penalty.weights import Checked


def test_numbers_of_any_library_and_callables():
    assert Checked(np.float32(0.5), "alpha", upper=1.0)(7) == 0.5
    assert Checked(lambda t: t / 10, "alpha", upper=1.0)(7) == 0.7


def test_schedules_pickle_and_show():
    schedule = Checked(math.sqrt, "weight")
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert str(schedule) == "<built-in function sqrt>"
    assert str(Checked(0.25, "weight")) == "0.25"
