"""Calls of the model inside of other calls, and in other threads: what is known of one is its thread's and depth's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import CLASSES, FEATURES, PATIENCE, batches, mlp
from tests.reference import EACH, assert_same_training, term_of, wrap

WAYS = pytest.mark.parametrize("way", ["line", "term"])


def crops(x: Tensor) -> Tensor:
    """Two crops of each image, (2, batch, features)."""
    return torch.stack([x, x.flip(1)])


class OfCrops(nn.Module):
    """Gives the mean of the logits of crops, for each of which it calls itself or its body."""

    def __init__(self, calls_itself: bool, fails_once: bool = False) -> None:
        super().__init__()
        self.body = mlp()
        self.calls_itself = calls_itself
        self.fails_once = fails_once

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return self.body(x)
        one = self if self.calls_itself else self.body
        if self.fails_once:
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                one(x[0, :, 1:])
        return torch.stack([one(crop) for crop in x]).mean(0)


class WithItsLoss(nn.Module):
    """Returns the loss of the logits, for which it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.body(x) if y is None else F.cross_entropy(self(x), y)


def trained(model: nn.Module, variant: str, way: str, data: Callable[[Tensor], Tensor], **options: Any) -> Any:
    optimizer = wrap(variant, model, **options)
    term = term_of(optimizer, way)
    for x, y in batches(8):
        optimizer.zero_grad()
        z = model(data(x))
        (F.cross_entropy(z, y) + term(z, y)).backward()
        optimizer.step()
    assert optimizer.logs()["skipped"] == 0
    return optimizer


@EACH
@WAYS
@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("fails_once", [False, True])
def test_a_model_that_calls_itself_trains_as_one_that_does_not(
    variant: str, way: str, weight: float, fails_once: bool
) -> None:
    """The logits are those of the outer call, which the loss is of."""
    alone = trained(OfCrops(calls_itself=False), variant, way, crops, weight=weight)
    calling = trained(OfCrops(calls_itself=True, fails_once=fails_once), variant, way, crops, weight=weight)
    assert_same_training(alone, calling)


@EACH
def test_a_model_that_returns_the_loss_of_a_call_of_itself_trains_as_its_logits(variant: str) -> None:
    model = WithItsLoss()
    optimizer = wrap(variant, model)
    for x, y in batches(8):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    assert_same_training(optimizer, trained(WithItsLoss(), variant, "line", lambda x: x))


@EACH
def test_logits_that_are_handed_on_from_an_inner_call_are_counted_once(variant: str) -> None:
    class HandsOn(WithItsLoss):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(x, again=False) if again else self.body(x)

    handing = trained(HandsOn(), variant, "line", lambda x: x)
    assert_same_training(handing, trained(WithItsLoss(), variant, "line", lambda x: x))


@EACH
def test_a_model_that_calls_itself_goes_on_after_an_error_or_an_interrupt(variant: str) -> None:
    errors: list[Any] = []

    class Interrupted(OfCrops):
        def forward(self, x: Tensor) -> Tensor:
            if errors and x.ndim == 2:
                raise errors.pop()
            return super().forward(x)

    model = Interrupted(calls_itself=True)
    optimizer = wrap(variant, model)
    for number, (x, y) in enumerate(batches(8)):
        for error in (KeyError("data"), KeyboardInterrupt()) if number in (0, 3) else ():
            errors.append(error)
            with pytest.raises(type(error)):
                model(crops(x))
            optimizer.zero_grad()
        F.cross_entropy(model(crops(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_training(optimizer, trained(OfCrops(calls_itself=False), variant, "line", crops))


# ---- threads ---------------------------------------------------------------------------------------------------------


class Observed(nn.Module):
    """Calls a function of the script in the middle of each forward pass of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.__dict__["middle"] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Observed:
        copied = Observed()
        copied.body = copy.deepcopy(self.body, memo)
        memo[id(self)] = copied
        return copied

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body[1](self.body[0](x))
        self.middle.get(threading.get_ident(), lambda: None)()
        return self.body[2](hidden)


def in_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@EACH
@WAYS
def test_another_thread_may_predict_during_a_training_forward_pass(variant: str, way: str) -> None:
    def predict() -> None:
        with torch.no_grad():
            assert model(torch.randn(4, FEATURES, dtype=torch.float64)).shape == (4, CLASSES)

    model = Observed()
    model.middle[threading.get_ident()] = lambda: in_a_thread(predict)
    watched = trained(model, variant, way, lambda x: x)
    assert_same_training(watched, trained(Observed(), variant, way, lambda x: x))
