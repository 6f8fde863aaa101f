"""Terms that are missing in a loss, that come too late, or whose optimizer regularizes no more."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_same, batches, mlp, one
from tests.reference import EACH, assert_same_training, loss_of, term_of, train, wrap

# ---- a term that is not in the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["steps by the line", "a gradient", "a gradient that is cleared"])
@EACH
def test_a_first_term_after_batches_of_the_line_is_said_once(variant, before):
    """A term from an epoch on leaves the epochs before to the line; first-order MAML takes a gradient first."""
    optimizer = wrap(variant, mlp())
    (x, y), *others = batches(4)
    F.cross_entropy(optimizer.model(x), y).backward()
    if before == "steps by the line":
        optimizer.step()
    elif before == "a gradient that is cleared":
        optimizer.zero_grad()
    with nullcontext() if "cleared" in before else pytest.warns(UserWarning, match="weight=lambda step"):
        loss = loss_of(optimizer, x, y)
    loss.backward()
    optimizer.step()
    train(optimizer, others, "term", F.cross_entropy)


@EACH
def test_steps_without_a_term_are_counted_and_said_once(variant):
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


@EACH
def test_a_learning_rate_of_0_hides_no_term_that_is_missing(variant):
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


def forgotten(optimizer, z, y):
    term_of(optimizer)(z, y)
    F.cross_entropy(z, y).backward()


def detached(optimizer, z, y):
    (F.cross_entropy(z, y) + term_of(optimizer)(z, y).detach()).backward()


def cleared_after_it_was_computed(optimizer, z, y):
    """As torch's tutorial clears."""
    term_of(optimizer)(z, y)
    optimizer.zero_grad()
    F.cross_entropy(z, y).backward()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("way", [forgotten, detached, cleared_after_it_was_computed])
@EACH
def test_a_term_in_no_backward_pass_is_an_error_at_the_step(variant, way, closure):
    optimizer, calm = (wrap(variant, mlp()) for _ in range(2))
    data = list(batches(4))
    x, y = data[2]
    train(optimizer, data[:2])
    before = copy.deepcopy(optimizer.model.state_dict())

    def evaluate():
        optimizer.zero_grad()
        way(optimizer, optimizer.model(x), y)

    with pytest.raises(RuntimeError, match=r"(?s)penalty.*add it to the loss"):
        optimizer.step(evaluate) if closure else (evaluate(), optimizer.step())
    assert_same(optimizer.model.state_dict(), before)
    assert_same_training(train(optimizer, data[3:]), train(calm, [*data[:2], data[3]]))


@EACH
def test_a_term_of_a_loss_that_takes_its_gradients_in_its_forward_pass_is_named(variant):
    """As fused cross-entropies do, which show their logits to nobody."""
    (x, y), optimizer = one(), wrap(variant, mlp())
    z = optimizer.model(x)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z, own):
            with torch.enable_grad():
                loss = F.cross_entropy(own, y) + term_of(optimizer)(own, y)
                (ctx.gradient,) = torch.autograd.grad(loss, own)
            return loss.detach()

        @staticmethod
        def backward(ctx, s):
            return s * ctx.gradient, None

    own = 1.0 * z.detach().requires_grad_() if variant == "dcp" else z
    Fused.apply(z, own).backward()
    with pytest.raises(
        RuntimeError, match=r"(?s)no backward pass that goes on to the parameters.*outside of fused losses"
    ):
        optimizer.step()


# ---- graphs of before the last step, and second derivatives ---------------------------------------------------------


@EACH
def test_a_graph_kept_over_several_steps_is_refused(variant):
    model = mlp()
    optimizer = wrap(variant, model)
    x, y = one()
    loss = F.cross_entropy(model(x), y)
    parameter = model[-1].bias  # what lies behind a weight autograd refuses, since the step has changed that
    loss.backward(retain_graph=True, inputs=[parameter])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"(?s)before the last step.*\n  Fix: call the model in each step"):
        loss.backward(inputs=[parameter])


@EACH
@pytest.mark.parametrize("after", ["a step", "a loaded state"])
def test_a_term_is_not_used_after_the_step_or_a_loaded_state(variant, after):
    (x, y), optimizer = one(), wrap(variant, mlp())
    term = term_of(optimizer)(optimizer.model(x), y)
    if after == "a step":
        term.backward(retain_graph=True)
        optimizer.step()
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"(?s)before the last step.*and penalty if the script adds it"):
        term.backward()


@EACH
def test_a_term_is_not_differentiated_twice(variant):
    """It would lose its second derivative without a word."""
    (x, y), optimizer = one(), wrap(variant, mlp())
    loss = loss_of(optimizer, x.requires_grad_(), y)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, x, create_graph=True)


# ---- an optimizer that regularizes no more --------------------------------------------------------------------------


@EACH
def test_the_term_is_refused_after_detach(variant):
    (x, y), optimizer = one(), wrap(variant, mlp())
    optimizer.detach()
    with pytest.raises(RuntimeError, match=r"penalty was called after detach\(\)"):
        term_of(optimizer)(optimizer.model(x), y)
    with torch.no_grad():
        assert term_of(optimizer)(optimizer.model(x), y) == 0.0


@EACH
def test_the_penalty_of_an_optimizer_that_another_has_replaced_is_refused(variant):
    model, (x, y) = mlp(), one()
    first, second = wrap(variant, model), wrap(variant, model)
    z = model(x)
    with pytest.raises(RuntimeError, match="another optimizer has wrapped the model"):
        term_of(first)(z, y)
    assert term_of(second)(z, y).requires_grad
    with torch.no_grad():
        assert term_of(first)(z, y) == 0
