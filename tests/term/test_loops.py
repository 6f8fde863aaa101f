"""``optimizer.penalty(...)`` in loops: LBFGS, steps that are left out, torch.compile, backward passes in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.by_hand import CLOSE, EACH, assert_same_training, by_hand, term_of, train, train_by_closures, wrap
from tests.helpers import assert_same, batches, dropout_net, mlp

STEPS = 6
margins = F.multi_margin_loss


# ---- LBFGS -----------------------------------------------------------------------------------------------------------


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


# ---- steps that are left out -----------------------------------------------------------------------------------------


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


# ---- torch.compile, and backward passes in parts ---------------------------------------------------------------------


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
