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
from tests.by_hand import (
    CLOSE,
    EACH,
    VARIANTS,
    apart,
    assert_same_training,
    by_hand,
    end,
    term_of,
    train,
    train_by_closures,
    wrap,
)
from tests.helpers import CLASSES, assert_same, batches, dropout_net, mlp

STEPS = 6
margins = F.multi_margin_loss


# ---- closures --------------------------------------------------------------------------------------------------------


@EACH
def test_a_step_with_a_closure_is_the_one_by_hand(variant: str) -> None:
    optimizer, hand = wrap(variant, dropout_net()), by_hand(variant, dropout_net())
    for trained in (optimizer, hand):
        torch.manual_seed(5)
        train_by_closures(trained, batches(STEPS), margins)
    assert_same_training(optimizer, hand, **CLOSE)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def with_lbfgs(variant: str) -> Any:
    """LBFGS cannot train a companion."""
    model, options = mlp(), {"companion_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    return wrap(variant, model, lbfgs(model), **options if variant == "dcl" else {})


@EACH
def test_lbfgs_minimizes_the_sum_and_the_first_evaluation_is_learned_from(variant: str) -> None:
    model = mlp()
    runs = with_lbfgs(variant), by_hand(variant, model, lbfgs(model))
    for trained in runs:
        train_by_closures(trained, batches(STEPS), margins)
    assert_same_training(*runs, rtol=1e-10, atol=1e-10)  # the line search divides by small differences


@EACH
def test_lbfgs_refuses_the_line(variant: str) -> None:
    optimizer = with_lbfgs(variant)
    with pytest.raises(RuntimeError, match=r"(?s)LBFGS.*optimizer\.penalty\("):
        train_by_closures(optimizer, batches(1), F.cross_entropy, way="line")
    assert_same(optimizer.model, mlp())


# ---- mixed precision -------------------------------------------------------------------------------------------------


def scaler_of(dtype: torch.dtype) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled=dtype == torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EACH
def test_half_precision_follows_float32_by_hand(variant: str, dtype: torch.dtype) -> None:
    """To a few units of rounding of the way, as in test_loops.py; float16 with a scale that grows to 65,536."""
    scaler, data = scaler_of(dtype), list(batches(12, 24, dtype=torch.float32))
    half = train(apart(variant), data, loss=F.cross_entropy, half=dtype, scaler=scaler)
    hand = train(apart(variant, by_hand), data, loss=F.cross_entropy)
    for found, expected, start in zip(end(half), end(hand), end(apart(variant)), strict=True):
        way = expected - start if len(start) else expected  # no prototypes before the first step
        assert (found - expected).norm() < 4 * torch.finfo(dtype).eps * way.norm()
    assert scaler.get_scale() == (2.0**16 if dtype == torch.float16 else 1.0)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
@EACH
def test_a_step_that_the_scaler_skips_leaves_nothing(variant: str, poison: str) -> None:
    found, data = [], list(batches(8, dtype=torch.float32))
    for meets_it in (True, False):
        optimizer = apart(variant)
        options = {"half": torch.float16, "scaler": scaler_of(torch.float16)}
        train(optimizer, data[:4], **options)
        if meets_it:
            factor = torch.inf if poison == "loss" else 1.0
            weight = optimizer.model[0].weight
            handle = weight.register_hook(lambda gradient: gradient * torch.inf if poison == "gradient" else None)
            train(optimizer, data[4:5], loss=lambda z, y, factor=factor: factor * margins(z, y), **options)
            handle.remove()
        found.append(train(optimizer, data[5:], **options))
    assert_same_training(*found)
    assert found[0].logs()["step"] == 7


@pytest.mark.parametrize("cleared", ["before the forward pass", "before the backward pass"])
@EACH
def test_a_step_that_the_script_leaves_out_leaves_nothing(variant: str, cleared: str) -> None:
    found = []
    for meets_it in (True, False):
        optimizer = wrap(variant, mlp())
        for index, (x, y) in enumerate(batches(STEPS)):
            if index == 3 and not meets_it:
                continue
            if cleared == "before the forward pass":
                optimizer.zero_grad()
            z = optimizer.model(x)
            loss = F.cross_entropy(z, y) + term_of(optimizer)(z, y)
            if cleared == "before the backward pass":
                optimizer.zero_grad()
            loss.backward()
            if index != 3:
                optimizer.step()
        found.append(optimizer)
    assert_same_training(*found)


# ---- states and weights ----------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("variant", "weight"), [("dcl", 0.7), ("dcp", "auto")])
def test_a_resumed_run_equals_the_uninterrupted_one(variant: str, weight: Any) -> None:
    data, runs = list(batches(12)), [wrap(variant, dropout_net(), weight=weight, distance="mse") for _ in range(3)]
    for optimizer, until in zip(runs, (12, 5), strict=False):
        torch.manual_seed(5)
        train(optimizer, data[:until])
    whole, half, again = runs
    again.model.load_state_dict(through_a_file(half.model.state_dict()))
    again.load_state_dict(through_a_file(half.state_dict()))
    train(again, data[5:])
    assert_same_training(again, whole)
    assert_same(again.state_dict(), whole.state_dict())


@EACH
def test_weight_zero_is_the_base_optimizer(variant: str) -> None:
    found = []
    for wrapped in (True, False):
        model = dropout_net()
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = wrap(variant, model, base, weight=0.0) if wrapped else base
        torch.manual_seed(5)
        train(optimizer, batches(STEPS), way="term" if wrapped else "line", call=model)
        found.append([model.state_dict(), base.state_dict()["state"], torch.get_rng_state()])
    assert_same(*found)


def test_an_automatic_weight_counts_the_terms_labels_as_the_lines() -> None:
    runs, figures = [], []
    for way in ("term", "line"):
        optimizer = wrap("dcp", mlp(), weight=AutoWeight(floor=0.1, power=1.0, classes=float(CLASSES)))
        for _ in range(20):
            train(optimizer, batches(4), way, F.cross_entropy, parts=2)
            figures.append({name: optimizer.logs()[name] for name in ("weight", "train_accuracy")})
        runs.append(optimizer)
    assert_same_training(*runs, rtol=1e-11, atol=1e-11)
    assert figures[:20] == figures[20:]
    assert figures[-1]["weight"] > 0.3


# ---- torch.compile and activation checkpointing ----------------------------------------------------------------------


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
    """A graph break at the term is fine."""
    torch._dynamo.reset()
    compiled, runs = partial(torch.compile, backend="aot_eager"), []
    for compiles in (True, False):
        optimizer, options = wrap(variant, Network()), {}
        if compiles and what == "model in place":
            optimizer.model.compile(backend="aot_eager")
        elif compiles:
            options = {"call": compiled(optimizer.model)} if what == "model" else {"compiled": compiled}
        torch.manual_seed(5)
        runs.append(train(optimizer, batches(STEPS), **options))
    torch._dynamo.reset()
    assert_same_training(*runs, **CLOSE)


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
            call = partial(checkpoint, call, use_reentrant=reentrant)
        elif checkpointed:
            call.reentrant = reentrant
        torch.manual_seed(5)
        runs.append(train(optimizer, [(x.requires_grad_(), y) for x, y in batches(STEPS)], call=call))
    assert_same_training(*runs)


@pytest.mark.parametrize("way", ["detached", "reentrant checkpoint"])
def test_a_backward_pass_that_is_split_at_the_logits(way: str) -> None:
    """When the term's backward pass ends, no parameter has a gradient yet."""
    results = []
    for splits in (False, True):
        model = mlp()
        optimizer = wrap("dcp", model)

        def loss(z: Tensor, y: Tensor, optimizer: Any = optimizer) -> Tensor:
            return margins(z, y) + optimizer.penalty(z, y)

        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = model(x)
            if not splits:
                loss(z, y).backward()
            elif way == "detached":
                leaf = z.detach().requires_grad_()
                loss(leaf, y).backward()
                z.backward(leaf.grad)
            else:
                checkpoint(loss, z, y, use_reentrant=True).backward()
            optimizer.step()
        results.append((model.state_dict(), optimizer.prototypes))
    assert_same(*results, **CLOSE)


def test_a_term_that_is_differentiated_twice_before_a_step_that_is_skipped() -> None:
    """As for norms of gradients; the term of the next step is found."""
    results = []
    for asks in (False, True):
        model = mlp()
        optimizer = wrap("dcp", model)
        for step, (x, y) in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            z = model(x)
            loss = margins(z, y) + optimizer.penalty(z, y)
            if asks:
                torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            if step != 2:
                optimizer.step()
        results.append((model.state_dict(), optimizer.prototypes))
    assert_same(*results, **CLOSE)
