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

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, PATIENCE, assert_same, batches, mlp, sgd

WRAPPERS = {"dcp": DCPOptimizer, "dcl": DCLOptimizer}
BOTH = pytest.mark.parametrize("kind", WRAPPERS)
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


def penalty(optimizer: Any, z: Tensor, y: Tensor) -> Any:
    return optimizer.penalty(z, y) if isinstance(optimizer, DCPOptimizer) else optimizer.penalty(z)


def trained(model: nn.Module, kind: str, way: str, data: Callable[[Tensor], Tensor], **options: Any) -> Any:
    optimizer: Any = WRAPPERS[kind](sgd(model), model, **{"weight": 1.0} | options)
    for x, y in batches(8):
        optimizer.zero_grad()
        z = model(data(x))
        loss = F.cross_entropy(z, y)
        (loss if way == "line" else loss + penalty(optimizer, z, y)).backward()
        optimizer.step()
    assert optimizer.logs()["skipped"] == 0
    return optimizer


def assert_trained_alike(first: Any, second: Any) -> None:
    assert_same(first.model, second.model)
    if isinstance(first, DCPOptimizer):
        assert_same(first.prototypes, second.prototypes)
    else:
        assert_same(first.companion, second.companion)


@BOTH
@WAYS
@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("fails_once", [False, True])
def test_a_model_that_calls_itself_trains_as_one_that_does_not(
    kind: str, way: str, weight: float, fails_once: bool
) -> None:
    """The logits are those of the outer call, which the loss is of."""
    alone = trained(OfCrops(calls_itself=False), kind, way, crops, weight=weight)
    calling = trained(OfCrops(calls_itself=True, fails_once=fails_once), kind, way, crops, weight=weight)
    assert_trained_alike(alone, calling)


@BOTH
def test_a_model_that_returns_the_loss_of_a_call_of_itself_trains_as_its_logits(kind: str) -> None:
    model = WithItsLoss()
    optimizer = WRAPPERS[kind](sgd(model), model, weight=1.0)
    for x, y in batches(8):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    assert_trained_alike(optimizer, trained(WithItsLoss(), kind, "line", lambda x: x))


@BOTH
def test_logits_that_are_handed_on_from_an_inner_call_are_counted_once(kind: str) -> None:
    class HandsOn(WithItsLoss):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(x, again=False) if again else self.body(x)

    handing = trained(HandsOn(), kind, "line", lambda x: x)
    assert_trained_alike(handing, trained(WithItsLoss(), kind, "line", lambda x: x))


@BOTH
def test_a_model_that_calls_itself_goes_on_after_an_error_or_an_interrupt(kind: str) -> None:
    errors: list[Any] = []

    class Interrupted(OfCrops):
        def forward(self, x: Tensor) -> Tensor:
            if errors and x.ndim == 2:
                raise errors.pop()
            return super().forward(x)

    model = Interrupted(calls_itself=True)
    optimizer: Any = WRAPPERS[kind](sgd(model), model, weight=1.0)
    for number, (x, y) in enumerate(batches(8)):
        for error in (KeyError("data"), KeyboardInterrupt()) if number in (0, 3) else ():
            errors.append(error)
            with pytest.raises(type(error)):
                model(crops(x))
            optimizer.zero_grad()
        F.cross_entropy(model(crops(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(optimizer, trained(OfCrops(calls_itself=False), kind, "line", crops))


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


@BOTH
@WAYS
def test_another_thread_may_predict_during_a_training_forward_pass(kind: str, way: str) -> None:
    def predict() -> None:
        with torch.no_grad():
            assert model(torch.randn(4, FEATURES, dtype=torch.float64)).shape == (4, CLASSES)

    model = Observed()
    model.middle[threading.get_ident()] = lambda: in_a_thread(predict)
    watched = trained(model, kind, way, lambda x: x)
    assert_trained_alike(watched, trained(Observed(), kind, way, lambda x: x))
