"""What has happened since the last step: terms that are missing, gradients that are cleared, nothing that is kept."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Storages, assert_same, batches, mlp, no_collector, one
from tests.reference import VARIANTS, learned, term_of, wrap

# ---- a script that has called penalty ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_without_a_term_are_counted_and_said_once(variant: str) -> None:
    """They are the base optimizer's; the logs have no figures of the step before."""
    optimizer = wrap(variant, mlp())
    for number, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        z = optimizer.model(x)
        loss = F.cross_entropy(z, y)
        if number % 2 == 0:
            loss = loss + term_of(optimizer)(z, y)
        loss.backward()
        with pytest.warns(UserWarning, match="a step without a penalty") if number == 1 else nullcontext():
            optimizer.step()
        assert math.isnan(optimizer.logs()["penalty"]) == bool(number % 2)
    assert optimizer.logs()["skipped"] == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_term_is_refused_after_detach(variant: str) -> None:
    (x, y), optimizer = one(), wrap(variant, mlp())
    optimizer.detach()
    with pytest.raises(RuntimeError, match=r"penalty was called after detach\(\)"):
        term_of(optimizer)(optimizer.model(x), y)
    with torch.no_grad():
        assert term_of(optimizer)(optimizer.model(x), y) == 0.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_that_is_loaded_between_penalty_and_backward_is_refused(variant: str) -> None:
    (x, y), optimizer = one(), wrap(variant, mlp())
    term = term_of(optimizer)(optimizer.model(x), y)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="before the last step"):
        term.backward()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_after_detach_is_the_bases_also_where_the_term_was_called(variant: str) -> None:
    (x, y), optimizer = one(), wrap(variant, mlp())
    z = optimizer.model(x)
    (F.cross_entropy(z, y) + term_of(optimizer)(z, y)).backward()
    optimizer.step()
    z = optimizer.model(x)
    term_of(optimizer)(z, y)
    F.cross_entropy(z, y).backward()
    optimizer.detach()
    optimizer.step()
    assert optimizer.logs()["step"] == 2.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_learning_rate_of_0_hides_no_term_that_is_missing(variant: str) -> None:
    """As in a warm-up; torch.distributed.checkpoint creates the state by such a step, without a forward pass."""
    optimizer = wrap(variant, mlp())
    for number, (x, y) in enumerate(batches(3)):
        optimizer.param_groups[0]["lr"] = 0.0 if number else 0.1
        optimizer.zero_grad()
        z = optimizer.model(x)
        term = term_of(optimizer)(z, y) if number < 2 else 0.0
        (F.cross_entropy(z, y) + (term if number == 0 else 0.0)).backward()
        if number == 0:
            optimizer.step()
        elif number == 1:
            with pytest.raises(RuntimeError, match="took part in no backward pass"):
                optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())  # the script begins anew
        else:
            with pytest.warns(UserWarning, match="a step without a penalty"):
                optimizer.step()
    assert optimizer.logs()["skipped"] == 1


def test_a_base_whose_parameters_are_all_frozen_is_no_model_that_was_built_again() -> None:
    """As where an input is trained by another optimizer."""
    optimizer = wrap("dcp", mlp())
    for x, y in batches(2):
        optimizer.zero_grad()
        prompt = torch.zeros_like(x).requires_grad_()
        z = optimizer.model(x + prompt)
        (F.cross_entropy(z, y) + optimizer.penalty(z, y)).backward()
        optimizer.step()
        assert prompt.grad is not None
        optimizer.model.requires_grad_(False)


# ---- where the logits are ------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Returns no logits under a name that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": x, "scores": self.body(x)}


def test_the_prototypes_term_takes_logits_that_the_model_hides() -> None:
    found = []
    for model in (Scores(), mlp()):
        optimizer = wrap("dcp", model)
        for x, y in batches(4):
            optimizer.zero_grad()
            output = model(x)
            z = output["scores"] if isinstance(output, dict) else output
            (F.cross_entropy(z, y) + optimizer.penalty(z, y)).backward()
            optimizer.step()
        found.append(([*model.parameters()], learned(optimizer)))
    assert_same(*found)


def test_by_the_line_a_model_that_hides_its_logits_is_an_error_at_the_step_that_names_its_keys() -> None:
    (x, y), model = one(), Scores()
    optimizer = wrap("dcp", model)
    F.cross_entropy(model(x)["scores"], y).backward()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"(?s)keys 'features', 'scores'.*logits=.*optimizer\.penalty\("):
        optimizer.step()
    assert_same([*model.parameters()], before)


# ---- gradients that are cleared in part ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_without_a_gradient_drops_no_micro_batch(variant: str) -> None:
    """DINO cancels the gradients of a layer."""
    found = []
    for cancels in (False, True):
        model = mlp()
        optimizer = wrap(variant, model, torch.optim.SGD(model.parameters(), lr=0.1), alpha=0.0)
        for x, y in batches(3):
            optimizer.zero_grad()
            for rows in (slice(0, 8), slice(8, 16)):
                (F.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
                if cancels:
                    model[0].weight.grad = None
            if not cancels:
                model[0].weight.grad.zero_()
            optimizer.step()
        found.append(learned(optimizer))
    assert_same(*found)


# ---- nothing is kept -----------------------------------------------------------------------------------------------


def of_the_line(optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(optimizer.model(x), y)


def of_the_term(optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    z = optimizer.model(x)
    return F.cross_entropy(z, y) + term_of(optimizer)(z, y)


@pytest.mark.parametrize("loss_of", [of_the_line, of_the_term])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loss_that_the_script_keeps_keeps_nothing_but_numbers(variant: str, loss_of: Any) -> None:
    """As in ``total = total + loss``, whose graph is that of all steps."""
    optimizer, batch = wrap(variant, mlp()), one()
    with no_collector(), Storages() as storages:
        total = torch.zeros(()).double()
        sizes = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(optimizer, *batch)
            loss.backward()
            optimizer.step()
            total = total + loss
            del loss
            sizes.append(storages.live()[1])
        growth = [later - before for before, later in itertools.pairwise(sizes[2:])]
    assert max(growth) <= 64, "bytes a step; the logits alone have 640"
