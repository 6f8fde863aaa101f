"""``optimizer.penalty(...)`` in every loop: closures, mixed precision, checkpoints, torch.compile, recomputation."""

from __future__ import annotations

import io
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcl_optim import AutoWeight
from tests.by_hand import CLOSE, VARIANTS, assert_same_training, by_hand, learned, term_of, wrap
from tests.helpers import CLASSES, assert_same, batches, dropout_net, mlp, sgd

EACH = pytest.mark.parametrize("variant", VARIANTS)
STEPS = 6


def train(optimizer: Any, data: Any, way: str = "term", model: Any = None, loss: Any = F.cross_entropy) -> Any:
    """The plain loop; ``model`` is what the script calls."""
    model, term = model or optimizer.model, term_of(optimizer, way)
    for x, y in data:
        optimizer.zero_grad()
        z = model(x)
        (loss(z, y) + term(z, y)).backward()
        optimizer.step()
    return optimizer


# ---- closures --------------------------------------------------------------------------------------------------------


def train_by_closures(optimizer: Any, way: str = "term", lazy: bool = False) -> None:
    term, criterion = term_of(optimizer, way), F.cross_entropy if way == "line" else F.multi_margin_loss
    torch.manual_seed(5)
    for x, y in batches(STEPS):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            z = optimizer.model(x)
            loss = criterion(z, y) + term(z, y)
            if not lazy:
                optimizer.zero_grad()
                loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("lazy", [False, True])
@EACH
def test_a_step_with_a_closure_is_the_one_by_hand(variant: str, lazy: bool) -> None:
    """``step`` runs the backward pass that the closure leaves out."""
    optimizer, hand = wrap(variant, dropout_net()), by_hand(variant, dropout_net())
    train_by_closures(optimizer, lazy=lazy)
    train_by_closures(hand)
    assert_same_training(optimizer, hand, **CLOSE)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def second(variant: str) -> dict[str, Any]:
    """LBFGS cannot train a companion."""
    return {"companion_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)} if variant == "dcl" else {}


@EACH
def test_lbfgs_minimizes_the_sum_and_the_first_evaluation_is_learned_from(variant: str) -> None:
    model, theirs = mlp(), mlp()
    optimizer = wrap(variant, model, lbfgs(model), **second(variant))
    hand = by_hand(variant, theirs, lbfgs(theirs))
    for trained in (optimizer, hand):
        train_by_closures(trained)
    assert_same_training(optimizer, hand, rtol=1e-10, atol=1e-10)  # whose line search divides by small differences


@EACH
def test_lbfgs_refuses_the_line(variant: str) -> None:
    model = mlp()
    optimizer = wrap(variant, model, lbfgs(model), **second(variant))
    with pytest.raises(RuntimeError, match=r"(?s)LBFGS.*optimizer\.penalty\("):
        train_by_closures(optimizer, way="line")
    assert_same(model, mlp())


# ---- mixed precision -------------------------------------------------------------------------------------------------

narrow = partial(mlp, dtype=torch.float32)


class Mixed:
    """A script with autocast and a gradient scaler; with float32 and no scaler, the one by hand."""

    def __init__(self, variant: str, dtype: torch.dtype, hand: bool = False) -> None:
        model, self.dtype = narrow(), dtype
        options: dict[str, Any] = {"companion": narrow(seed=3)} if variant == "dcl" else {}
        self.optimizer = by_hand(variant, model, **options) if hand else wrap(variant, model, **options)
        half = dtype == torch.float16
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled=half)

    def step(self, x: Tensor, y: Tensor, poison: float = 1.0) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            z = self.optimizer.model(x)
            assert z.dtype == self.dtype
            loss = F.cross_entropy(z, y) + term_of(self.optimizer)(z, y)
        self.scaler.scale(loss * poison).backward()
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def end(self) -> tuple[Tensor, Tensor]:
        """Weights, and what was learned."""
        states = dict(self.optimizer.model.state_dict()), learned(self.optimizer)
        return tuple(torch.cat([tensor.flatten() for tensor in state.values()]) for state in states)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EACH
def test_half_precision_follows_float32_by_hand(variant: str, dtype: torch.dtype) -> None:
    """To a few units of rounding of the way, as in test_loops.py; float16 with a scaler whose scale grows."""
    mixed, hand, still = Mixed(variant, dtype), Mixed(variant, torch.float32, hand=True), Mixed(variant, torch.float32)
    for batch in batches(12, 24, dtype=torch.float32):
        mixed.step(*batch)
        hand.step(*batch)
    for found, expected, start in zip(mixed.end(), hand.end(), still.end(), strict=True):
        way = expected - start if len(start) else expected  # no prototypes before the first step
        assert (found - expected).norm() < 4 * torch.finfo(dtype).eps * way.norm()
    assert mixed.scaler.get_scale() == (2.0**16 if dtype == torch.float16 else 1.0)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
@EACH
def test_after_a_step_that_the_scaler_skips_the_run_is_as_if_it_had_not_seen_the_batch(variant: str, poison: str) -> None:
    found = []
    for meets_it in (True, False):
        mixed = Mixed(variant, torch.float16)
        for index, (x, y) in enumerate(batches(8, dtype=torch.float32)):
            if index == 4 and poison == "gradient":
                handle = mixed.optimizer.model[0].weight.register_hook(lambda gradient: gradient * torch.inf)
            if index != 4 or meets_it:
                mixed.step(x, y, torch.inf if index == 4 and poison == "loss" else 1.0)
            if index == 4 and poison == "gradient":
                handle.remove()
        found.append(mixed)
    assert_same_training(found[0].optimizer, found[1].optimizer)
    assert found[0].optimizer.logs()["step"] == 7


# ---- states and weights ----------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("variant", "weight"), [("dcl", 0.7), ("dcp", "auto")])
def test_a_resumed_run_equals_the_uninterrupted_one(variant: str, weight: Any) -> None:
    data = list(batches(12))
    whole, half, again = (wrap(variant, dropout_net(), weight=weight, distance="mse") for _ in range(3))
    torch.manual_seed(5)
    train(whole, data, loss=F.multi_margin_loss)
    torch.manual_seed(5)
    train(half, data[:5], loss=F.multi_margin_loss)
    again.model.load_state_dict(through_a_file(half.model.state_dict()))
    again.load_state_dict(through_a_file(half.state_dict()))
    train(again, data[5:], loss=F.multi_margin_loss)
    assert_same_training(again, whole)
    assert_same(again.state_dict(), whole.state_dict())


@EACH
def test_weight_zero_is_the_base_optimizer(variant: str) -> None:
    found = []
    for wrapped in (True, False):
        model = dropout_net()
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = wrap(variant, model, base, weight=0.0) if wrapped else base
        term = term_of(optimizer) if wrapped else lambda *_: 0.0
        torch.manual_seed(5)
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = model(x)
            (F.multi_margin_loss(z, y) + term(z, y)).backward()
            optimizer.step()
        found.append((model.state_dict(), base.state_dict(), torch.get_rng_state()))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1]["state"], found[1][1]["state"])
    assert_same(found[0][2], found[1][2])


@pytest.mark.parametrize("parts", [1, 2])
def test_an_automatic_weight_counts_the_terms_labels_as_the_lines(parts: int) -> None:
    runs = []
    for way in ("term", "line"):
        optimizer = wrap("dcp", mlp(), weight=AutoWeight(floor=0.1, power=1.0, classes=float(CLASSES)))
        term, weights = term_of(optimizer, way), []
        for x, y in list(batches(2, 32)) * 20:
            optimizer.zero_grad()
            for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                z = optimizer.model(rows)
                ((F.cross_entropy(z, labels) + term(z, labels)) / parts).backward()
            optimizer.step()
            logs = optimizer.logs()
            weights.append((logs["weight"], logs["train_accuracy"]))
        runs.append((optimizer, weights))
    assert_same_training(runs[0][0], runs[1][0], rtol=1e-11, atol=1e-11)
    assert runs[0][1] == runs[1][1]
    assert runs[0][1][-1][0] > 0.3


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A class of the script's own: its hooks run outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dropout_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("what", ["model", "model in place", "loss function"])
@EACH
def test_compiled_equals_eager(variant: str, what: str) -> None:
    torch._dynamo.reset()
    runs = []
    for compiles in (True, False):
        compiled = partial(torch.compile, backend="aot_eager") if compiles else lambda function: function
        optimizer = wrap(variant, Network())
        call, term = optimizer.model, term_of(optimizer)

        def criterion(z: Tensor, y: Tensor, term: Any = term) -> Tensor:
            return F.multi_margin_loss(2.0 * z, y) + term(z, y)

        if what == "model":
            call = compiled(call)
        elif what == "model in place" and compiles:
            call.compile(backend="aot_eager")
        elif what == "loss function":
            criterion = compiled(criterion)
        torch.manual_seed(5)
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            criterion(call(x), y).backward()
            optimizer.step()
        runs.append(optimizer)
    torch._dynamo.reset()
    assert_same_training(*runs, **CLOSE)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Blocks(nn.Sequential):
    """Recomputes its body in the backward pass, if ``reentrant`` is True or False."""

    reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return super().forward(x)
        return self[-1](checkpoint(self[:-1], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize(
    ("variant", "whole", "reentrant"),
    [cell for cell in product(VARIANTS, [False, True], [False, True]) if cell != ("dcl", True, True)],
)
def test_recomputation_in_the_backward_pass_equals_plain(variant: str, whole: bool, reentrant: bool) -> None:
    """A reentrant checkpoint runs the whole model without gradients: what it returns, only prototypes take."""
    runs = []
    for checkpointed in (True, False):
        optimizer = wrap(variant, Blocks(*dropout_net()))
        call = optimizer.model
        if checkpointed and whole:
            call = partial(checkpoint, optimizer.model, use_reentrant=reentrant)
        elif checkpointed:
            optimizer.model.reentrant = reentrant
        torch.manual_seed(5)
        data = [(x.requires_grad_(), y) for x, y in batches(STEPS)]
        runs.append(train(optimizer, data, model=call, loss=F.multi_margin_loss))
    assert_same_training(*runs)
