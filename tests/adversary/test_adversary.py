"""Random losses and loops of fixed seeds. A case that fails is printed as a script.

It becomes a test of its module, and its seed joins ``SEEDS``. ``python -m tests.adversary SEED`` explores another one.
"""

from __future__ import annotations

import pytest

from tests.adversary.loops import check
from tests.adversary.losses import count

SEEDS = (29, 30, 31, 32, 37, 41)
CASES, LOOPS = 6, 75  # of each seed: of each kind of loss, of loops
each_seed = pytest.mark.parametrize("seed", SEEDS)


@each_seed
@pytest.mark.parametrize("readable", [True, False])
def test_labels_and_scales_that_are_read(seed: int, readable: bool) -> None:
    counts, faults = count(CASES, seed, readable)
    total = list(counts.values())[-1]
    assert total["wrong"] <= 0.002 * total["rows"], faults[0]
    if readable:
        assert not faults, faults[0]
        assert total["refused"] + total["hardly read"] <= 0.1 * total["cases"]
        assert total["scales"] > 5 * total["cases"]


@each_seed
@pytest.mark.parametrize("interrupted", [True, False])
def test_loops(seed: int, interrupted: bool) -> None:
    check(LOOPS, seed, interrupted)
