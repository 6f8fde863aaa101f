"""Random networks, optimizers, options and loops against the algorithm written out, in float64 over several steps.

Fifty of each kind, always the same; ``HYPOTHESIS_PROFILE=nightly`` draws five hundred new ones of each.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers import assert_same, through_a_file
from tests.reliability.cases import Case, Script, cases, wrapped

variants = st.sampled_from(["dcl", "dcp"])
random_cases = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "fifty"))


@random_cases
@given(cases(), variants)
def test_zero_weight_is_the_base_optimizer_bit_for_bit(case: Case, variant: str) -> None:
    ours = wrapped(case, variant, weight=0.0)
    model = case.model()
    alone = Script(replace(case, way="line"), model, case.base.build(model))
    ends = []
    for script in (ours, alone):
        torch.manual_seed(case.seed)
        script.run(case.batches())
        ends.append(torch.get_rng_state())
    assert_same(ours.model, model)
    assert_same(ours.optimizer.base.state_dict(), alone.optimizer.state_dict())
    assert torch.equal(*ends)


@random_cases
@given(cases(), variants, st.integers(0, 8))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case: Case, variant: str, stop: int) -> None:
    assume(case.base.name != "NAdam")  # torch's own loads its float32 product of momenta as float64, and rounds anew
    stop = min(stop, case.steps)
    whole = wrapped(case, variant)
    torch.manual_seed(case.seed)
    whole.run(case.batches())
    expected = everything(whole)

    first = wrapped(case, variant)
    torch.manual_seed(case.seed)
    first.run(case.batches()[:stop])
    state = through_a_file(everything(first))

    second = wrapped(case, variant)
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"])
    second.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"])
    second.run(case.batches()[stop:])
    assert_same(everything(second), expected)


def everything(script: Script) -> dict[str, Any]:
    parts = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
    return {name: part.state_dict() for name, part in parts.items()} | {"random": torch.get_rng_state()}
