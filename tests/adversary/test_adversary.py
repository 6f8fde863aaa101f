"""Random losses, loops and trainings, others for each commit, against what is known about them.

A case that fails is printed as a script that reproduces it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as of_seed

from tests.adversary import SEED
from tests.adversary.loops import Loop, loops
from tests.adversary.losses import count

CASES = 40  # of each kind of loss: 200,000 rows that can be read
CLOSE = 1e-8
drawn = settings(
    derandomize=False, database=None, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)


@pytest.mark.parametrize("readable", [True, False])
def test_labels_and_scales_that_are_read(readable: bool) -> None:
    counts, faults = count(CASES, SEED, readable)
    *kinds, total = counts.values()
    assert total["wrong"] <= 0.002 * total["rows"], f"seed {SEED}: {counts}"
    if readable:
        assert not faults, f"seed {SEED}: {counts}\n\n{faults[0].script()}"
        assert total["rows"] >= 40_000
        assert total["unread"] <= 0.03 * total["rows"]
        for kind in kinds:
            assert kind["refused"] <= 0.05 * CASES
            assert kind["scales"] > CASES


def check(number: int, examples: int, interrupted: bool) -> None:
    """Compare random loops with the literal ones."""
    seen = []

    def equals(loop: Loop) -> None:
        seen.append(loop)
        try:
            error = loop.error()
        except Exception as exception:
            raise AssertionError(f"seed {SEED + number}\n\n{loop.script()}") from exception
        assert error <= CLOSE, f"seed {SEED + number}: {error:.1e}\n\n{loop.script()}"

    of_seed(SEED + number)(settings(drawn, max_examples=examples)(given(loops(interrupted))(equals)))()
    assert len(seen) >= examples


@pytest.mark.parametrize("number", range(5))
def test_loops(number: int) -> None:
    check(number, 120, interrupted=True)


@pytest.mark.parametrize("number", range(3))
def test_trainings(number: int) -> None:
    check(number, 300, interrupted=False)
