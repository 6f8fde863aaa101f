"""Random networks, optimizers, options and loops against the algorithm written out, in float64 over several steps.

Fifty of each kind, always the same; ``HYPOTHESIS_PROFILE=nightly`` draws five hundred new ones of each.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dcl_optim.reference import dcl_step, dcp_step
from tests.helpers import assert_same
from tests.reliability.cases import DISTANCES, IGNORED, Case, Script, cases, set_rates, wrapped

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
variants = st.sampled_from(["dcl", "dcp"])
random_cases = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "fifty"))


@random_cases
@given(cases(), st.sampled_from([1, 1, 2]), st.sampled_from([1.0, 1.0, 0.5]))
def test_dcl_equals_reference(case: Case, every: int, lr_scale: float) -> None:
    ours = wrapped(case, "dcl", companion_every=every, companion_lr_scale=lr_scale)
    torch.manual_seed(case.seed)
    ours.run(case.batches())

    model, companion = case.model(), case.model()
    plain, chasing = case.base.build(model), case.base.build(companion, lr_scale)
    torch.manual_seed(case.seed)
    for step, (x, y) in enumerate(case.batches(), 1):
        for optimizer in (plain, chasing):
            set_rates(optimizer, case.rates[step - 1])
        dcl_step(
            *(model, companion, plain, chasing, x, y),
            lambda z, y: case.loss(F.cross_entropy, z, y),
            DISTANCES[case.distance][1],
            weight=case.weight_at(step),
            alpha=case.alpha_at(step),
            learns=step % every == 0,
        )
    assert_same(ours.model, model, **CLOSE)
    assert_same(ours.optimizer.companion, companion, **CLOSE)


@random_cases
@given(cases(), st.booleans())
def test_dcp_equals_reference(case: Case, ignored: bool) -> None:
    ignored = ignored and case.parts == 1
    ours = wrapped(case, "dcp")
    torch.manual_seed(case.seed)
    ours.run(case.batches(ignored))

    model, prototypes, numbers = case.model(), {}, {}
    plain = case.base.build(model)
    torch.manual_seed(case.seed)
    for step, (x, y) in enumerate(case.batches(ignored), 1):
        set_rates(plain, case.rates[step - 1])
        labelled = y != IGNORED
        dcp_step(
            *(lambda x, rows=labelled: model(x)[rows], prototypes, plain, x, y[labelled]),
            lambda z, y: case.loss(F.cross_entropy, z, y),
            DISTANCES[case.distance][1],
            weight=case.weight_at(step),
            alpha=case.alpha_at(step),
            numbers=numbers,
        )
    assert_same(ours.model, model, **CLOSE)
    unseen = torch.zeros(case.classes, dtype=torch.float64)
    expected = torch.stack([prototypes.get(k, unseen) for k in range(case.classes)])
    assert_same(ours.optimizer.prototypes, expected, **CLOSE)


@random_cases
@given(cases(), variants)
def test_zero_weight_is_the_base_optimizer_bit_for_bit(case: Case, variant: str) -> None:
    ours = wrapped(case, variant, weight=0.0)
    model = case.model()
    # A plain optimizer is not served a closure that leaves the backward to it, and computes the same in a plain loop.
    alone = Script(plainly(case), model, case.base.build(model), torch.nn.CrossEntropyLoss())
    ends = []
    for script in (ours, alone):
        torch.manual_seed(case.seed)
        script.run(case.batches())
        ends.append(torch.get_rng_state())
    assert_same(ours.model, model)
    assert_same(ours.optimizer.base.state_dict(), alone.optimizer.state_dict())
    assert torch.equal(*ends)


def plainly(case: Case) -> Case:
    return Case(**(vars(case) | {"loop": "plain"}))


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
    file = io.BytesIO()
    torch.save(everything(first), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

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
