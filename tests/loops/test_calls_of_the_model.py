"""Calls of the model inside of other calls, and in other threads, which are no training forward passes."""

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


class WithItsLoss(nn.Module):
    """Returns the loss of the logits, for which it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.body(x) if y is None else F.cross_entropy(self(x), y)


def trained(model: nn.Module, variant: str, way: str) -> Any:
    optimizer = wrap(variant, model)
    term = term_of(optimizer, way)
    for x, y in batches(8):
        optimizer.zero_grad()
        z = model(x)
        (F.cross_entropy(z, y) + term(z, y)).backward()
        optimizer.step()
    assert optimizer.logs()["skipped"] == 0
    return optimizer


@EACH
def test_a_model_that_returns_the_loss_of_a_call_of_itself_trains_as_its_logits(variant: str) -> None:
    model = WithItsLoss()
    optimizer = wrap(variant, model)
    for x, y in batches(8):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    assert_same_training(optimizer, trained(WithItsLoss(), variant, "line"))


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
    watched = trained(model, variant, way)
    assert_same_training(watched, trained(Observed(), variant, way))


@EACH
@WAYS
@pytest.mark.parametrize("is_eval", [False, True])
def test_a_forward_pass_may_predict_on_its_way(variant: str, way: str, is_eval: bool) -> None:
    """Without gradients, or in eval mode with them."""

    def predict() -> None:
        here = model.middle.pop(threading.get_ident())
        with torch.set_grad_enabled(is_eval):
            model.train(not is_eval)
            assert model(torch.randn(4, FEATURES, dtype=torch.float64)).shape == (4, CLASSES)
            model.train()
        model.middle[threading.get_ident()] = here

    model = Observed()
    model.middle[threading.get_ident()] = predict
    watched = trained(model, variant, way)
    assert_same_training(watched, trained(Observed(), variant, way))
