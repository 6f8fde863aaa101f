"""How a trial and the benchmarks time: interleaved rounds, the same number of steps each, no garbage collection."""

import gc

import pytest

from dcl_optim.trial import timing


def test_rounds_are_interleaved_and_rotated():
    order = []
    named = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = timing.interleaved(named, rounds=4, count=2)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_the_collector_is_off_while_a_slot_runs_and_back_afterwards():
    seen = []
    timing.seconds_per_step(lambda: seen.append(gc.isenabled()), 3)
    with pytest.raises(ZeroDivisionError):
        timing.seconds_per_step(lambda: 1 / 0, 1)
    assert (seen, gc.isenabled()) == ([False] * 3, True)


def test_a_ratio_is_taken_within_each_round():
    """Round two ran on a machine ten times slower; the ratio does not see it."""
    assert timing.ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == {"median": 2.0, "lower": 2.0, "upper": 2.0}
    assert timing.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "lower": 2.0, "upper": 4.0}
    assert timing.quartiles([7.0]) == {"median": 7.0, "lower": 7.0, "upper": 7.0}
