"""A batch whose gradient is not finite gets no penalty and is not learned from, whether the script steps or not."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim.pytorch import synchronization
from tests.helpers import assert_same, batches, mlp
from tests.reference import VARIANTS, learned, wrap

NAN, INF = float("nan"), float("inf")


class Script:
    """A training script, which may meet a bad batch."""

    def __init__(self, variant: str, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.model = mlp(dtype=dtype)
        base = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = wrap(variant, self.model, base, **{"distance": "mse"} | options)

    def backward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> None:
        (factor * F.cross_entropy(self.model(x), y)).backward()

    def train(self, data: Any) -> None:
        for x, y in data:
            self.optimizer.zero_grad()
            self.backward(x, y)
            self.optimizer.step()

    def step_with_zeros(self, bad: Any, x: Tensor, y: Tensor) -> None:
        """As a script that cleans its gradients and steps all the same."""
        self.optimizer.zero_grad()
        bad(self, x, y)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        self.optimizer.step()

    def state(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def is_finite(self) -> bool:
        return all(
            bool(tensor.isfinite().all()) for tensor in [*self.model.parameters(), *learned(self.optimizer).values()]
        )


def nan_in_the_input(script: Script, x: Tensor, y: Tensor) -> None:
    x = x.clone()
    x[1, 2] = NAN
    script.backward(x, y)


def inf_in_the_loss(script: Script, x: Tensor, y: Tensor) -> None:
    script.backward(x, y, INF)


BAD = [nan_in_the_input, inf_in_the_loss]
STARTS = [0, 2]  # the first batch, from which the loss's form would be read, and a later one
CASES = list(itertools.product(VARIANTS, BAD, STARTS))


@pytest.mark.parametrize(("variant", "bad", "start"), CASES)
def test_a_bad_batch_that_is_skipped_leaves_no_trace(variant, bad, start):
    """As a gradient scaler skips it: no step, and the next batch begins with zero_grad."""
    found = []
    for meets_it in (True, False):
        script, data = Script(variant), list(batches(start + 4))
        script.train(data[:start])
        if meets_it:
            script.optimizer.zero_grad()
            bad(script, *data[start])
        script.train(data[start + 1 :])
        found.append(script.state())
    assert_same(*found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_scaler_that_starts_too_high_comes_down(variant):
    """Its first steps overflow, are skipped and say nothing."""
    script, scaler = Script(variant, torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before = script.model[0].weight.clone()
    for x, y in batches(16):
        script.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(script.model(x.float()), y)
        scaler.scale(loss).backward()
        scaler.step(script.optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**24
    assert not torch.equal(script.model[0].weight, before)
    assert script.optimizer.logs()["loss_scale"] == pytest.approx(scaler.get_scale(), rel=0.05)
    assert script.is_finite()


# ---- where values may not be read ------------------------------------------------------------------------------------


@pytest.fixture
def rarely_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: in steps 1, 2, 4, 8."""
    monkeypatch.setattr(synchronization, "may_sync", lambda step, tensor: step & (step - 1) == 0)


@pytest.mark.filterwarnings("ignore:the companion's weights are not finite")
@pytest.mark.usefixtures("rarely_read")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("variant", "distance"),
    [("dcl", "mse"), ("dcl", "kl"), ("dcl", "infonce"), ("dcp", "mse"), ("dcp", "kl")],
)
def test_where_it_is_not_found_out_training_goes_on_too(variant, distance, bad):
    """The companion itself may be spoiled by its own backward pass; it is copied from the model by step 9."""
    script, data = Script(variant, distance=distance), list(batches(12))
    script.train(data[:4])
    script.step_with_zeros(bad, *data[4])
    for batch in data[5:]:
        script.train([batch])
        assert all(bool(parameter.isfinite().all()) for parameter in script.model.parameters())
    assert script.is_finite()
    assert 0 < script.optimizer.logs()["penalty"] < INF
