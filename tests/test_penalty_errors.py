"""``optimizer.penalty(...)``: wrong arguments, a term that is not in the loss, no gradients, batches that are not finite."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.by_hand import VARIANTS, assert_same_training, learned, term_of, wrap
from tests.helpers import FEATURES, assert_same, batches, dropout_net, mlp

EACH = pytest.mark.parametrize("variant", VARIANTS)


def step(optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    z = optimizer.model(x)
    (F.multi_margin_loss(z, y) + term_of(optimizer)(z, y)).backward()
    optimizer.step()


# ---- wrong arguments: the name, the value, the fix -------------------------------------------------------------------


def dense(z: Tensor) -> Tensor:
    """(16, 5, 3)."""
    return torch.stack([z, 2 * z, 3 * z], 2)


Arguments = Callable[[Tensor, Tensor], tuple[Any, ...]]
OF_DCP: dict[str, tuple[Arguments, type[Exception], list[str]]] = {
    "a label that is too large": (lambda z, y: (z, y + 3), ValueError, ["labels", "5", "0..4", "ignore_index"]),
    "a negative label": (lambda z, y: (z, y.index_fill(0, y[:1], -1)), ValueError, ["labels", "-1", "ignore_index"]),
    "a label too few": (lambda z, y: (z, y[1:]), ValueError, ["labels", "(15,)", "(16, 5)"]),
    "labels in a column": (lambda z, y: (z, y[:, None]), ValueError, ["labels", "(16, 1)", "(16, 5)"]),
    "dense labels in one row": (lambda z, y: (dense(z), y.repeat(3)), ValueError, ["labels", "(48,)", "(16, 5, 3)"]),
    "transposed labels": (lambda z, y: (dense(z), y.expand(3, -1)), ValueError, ["labels", "(3, 16)", "(16, 5, 3)"]),
    "soft labels of other classes": (
        lambda z, y: (z, F.one_hot(y, 6).double()),
        (TypeError, ValueError),
        ["labels", "(16, 6)", "(16, 5)"],
    ),
    "soft labels of sigmoids": (lambda z, y: (z, torch.ones_like(z)), ValueError, ["labels", "DCLOptimizer"]),
    "labels of floats": (lambda z, y: (z, y.double()), TypeError, ["labels", "float64", "(16,)"]),
    "labels of bools": (lambda z, y: (z, y > 2), TypeError, ["labels", "bool"]),
    "a list of labels": (lambda z, y: (z, y.tolist()), TypeError, ["labels", "list"]),
    "no labels": (lambda z, y: (z, None), TypeError, ["labels", "NoneType"]),
    "logits in one dimension": (lambda z, y: (z[:, 0], y), ValueError, ["logits", "(16,)"]),
    "logits of fewer classes": (lambda z, y: (z[:, :4], y.clamp(max=3)), ValueError, ["logits", "4", "5"]),
}
OF_DCL: dict[str, tuple[Arguments, type[Exception], list[str]]] = {
    "other values": (lambda z, y: (2 * z,), ValueError, ["logits", "(16, 5)", "returned"]),
    "some of the rows": (lambda z, y: (z[:8],), ValueError, ["logits", "(8, 5)", "returned"]),
    "logits of another model": (
        lambda z, y: (mlp(seed=9)(torch.ones(16, FEATURES).double()),),
        ValueError,
        ["logits", "returned"],
    ),
}
OF_BOTH: dict[str, tuple[Arguments, type[Exception], list[str]]] = {
    "logits of integers": (lambda z, y: (z.long(), y), TypeError, ["logits", "int64"]),
    "a list of logits": (lambda z, y: ([z], y), TypeError, ["logits", "list"]),
    "a model's output": (lambda z, y: ({"logits": z}, y), TypeError, ["logits", "dict"]),
}
ARGUMENTS = [("dcp", what) for what in OF_DCP | OF_BOTH] + [("dcl", what) for what in OF_DCL | OF_BOTH]


@pytest.mark.parametrize(("variant", "what"), ARGUMENTS)
def test_wrong_arguments_are_named_and_the_run_goes_on_as_if_they_had_not_been(variant: str, what: str) -> None:
    optimizer, calm = (wrap(variant, mlp()) for _ in range(2))
    data = list(batches(4))
    for trained in (optimizer, calm):
        step(trained, *data[0])
    arguments, error, words = (OF_DCP | OF_DCL | OF_BOTH)[what]
    given = arguments(optimizer.model(data[1][0]), data[1][1].clamp(min=2))
    with pytest.raises(error) as caught:
        optimizer.penalty(*(given if variant == "dcp" else given[:1]))
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert not [gone for gone in ("targets", "class_dim", "loss_scale") if gone in message], message
    for batch in data[2:]:
        for trained in (optimizer, calm):
            step(trained, *batch)
    assert_same_training(optimizer, calm)


def test_an_ignored_label_that_is_no_integer_is_refused() -> None:
    optimizer, (x, y) = wrap("dcp", mlp()), next(batches(1))
    with pytest.raises(TypeError, match=r"ignore_index=1\.5 must be an integer"):
        optimizer.penalty(optimizer.model(x), y, ignore_index=1.5)


@pytest.mark.parametrize("what", ["eval mode", "reentrant checkpoint", "an earlier step"])
def test_what_no_training_forward_pass_of_the_step_returned_has_no_companion(what: str) -> None:
    optimizer, (x, y) = wrap("dcl", mlp()), next(batches(1))
    if what == "eval mode":
        z = optimizer.model.eval()(x)
    elif what == "reentrant checkpoint":  # which runs the model without gradients
        z = checkpoint(optimizer.model, x.requires_grad_(), use_reentrant=True)
    else:
        z = optimizer.model(x)
        (F.cross_entropy(z, y) + optimizer.penalty(z)).backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(ValueError, match=r"(?s)logits.*\(16, 5\).*training forward pass"):
        optimizer.penalty(z)


# ---- a term that is not in the loss ----------------------------------------------------------------------------------


def forgotten(optimizer: Any, x: Tensor, y: Tensor) -> None:
    z = optimizer.model(x)
    term_of(optimizer)(z, y)
    F.cross_entropy(z, y).backward()
    optimizer.step()


def after_the_backward_pass(optimizer: Any, x: Tensor, y: Tensor) -> None:
    z = optimizer.model(x)
    F.cross_entropy(z, y).backward()
    term_of(optimizer)(z, y)
    optimizer.step()


def detached(optimizer: Any, x: Tensor, y: Tensor) -> None:
    z = optimizer.model(x)
    (F.cross_entropy(z, y) + term_of(optimizer)(z, y).detach()).backward()
    optimizer.step()


def in_a_closure(optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        z = optimizer.model(x)
        term_of(optimizer)(z, y)
        loss = F.cross_entropy(z, y)
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("way", [forgotten, after_the_backward_pass, detached, in_a_closure])
@EACH
def test_a_term_in_no_backward_pass_is_an_error_at_the_step(variant: str, way: Callable[..., None]) -> None:
    optimizer, calm = (wrap(variant, mlp()) for _ in range(2))
    data = list(batches(4))
    for batch in data[:2]:
        step(optimizer, *batch)
        step(calm, *batch)
    before = copy.deepcopy(optimizer.model.state_dict())
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"(?s)penalty.*add it to the loss"):
        way(optimizer, *data[2])
    assert_same(optimizer.model.state_dict(), before)
    step(optimizer, *data[3])
    step(calm, *data[3])
    assert_same_training(optimizer, calm)


# ---- without gradients -----------------------------------------------------------------------------------------------


def validate(optimizer: Any, how: str) -> None:
    model, term = optimizer.model, term_of(optimizer)
    draws = torch.get_rng_state()
    model.train(how == "training mode")
    for x, y in batches(2, seed=9, dtype=next(model.parameters()).dtype):
        with torch.inference_mode() if how == "inference mode" else torch.no_grad():
            found = [term(model(x), y)]
        if how == "training mode":
            found.append(term(model(x).detach(), y))
        for value in found:
            assert (float(value), value.shape, value.requires_grad) == (0.0, (), False)
            assert value.dtype == torch.promote_types(x.dtype, torch.float32)
    model.train()
    torch.set_rng_state(draws)


@pytest.mark.parametrize("how", ["eval mode", "training mode", "inference mode"])
@EACH
def test_a_validation_is_not_observed(variant: str, how: str) -> None:
    """One function serves both; no labels are looked at, and no term is missed in the next step."""
    found = []
    for validates in (True, False):
        optimizer = wrap(variant, dropout_net())
        torch.manual_seed(5)
        for batch in batches(4):
            step(optimizer, *batch)
            if validates:
                validate(optimizer, how)
        found.append(optimizer)
    assert_same_training(*found)
    assert_same(found[0].state_dict(), found[1].state_dict())
    validate(wrap(variant, mlp(dtype=torch.bfloat16)), how)


# ---- batches that are not finite -------------------------------------------------------------------------------------


def backward(optimizer: Any, x: Tensor, y: Tensor, factor: float = 1.0) -> None:
    z = optimizer.model(x)
    (factor * (F.cross_entropy(z, y) + term_of(optimizer)(z, y))).backward()


def nan_in_the_input(optimizer: Any, x: Tensor, y: Tensor) -> None:
    backward(optimizer, torch.where(torch.arange(len(x))[:, None] == 2, torch.nan, x), y)


def an_overflow_in_the_logits(optimizer: Any, x: Tensor, y: Tensor) -> None:
    handle = optimizer.model[-1].register_forward_hook(lambda *found: found[-1].index_fill(0, y[:1], torch.inf))
    backward(optimizer, x, y)
    handle.remove()


def infinite_factor(optimizer: Any, x: Tensor, y: Tensor) -> None:
    backward(optimizer, x, y, torch.inf)


@pytest.mark.parametrize("bad", [nan_in_the_input, an_overflow_in_the_logits, infinite_factor])
@EACH
def test_a_batch_that_is_not_finite_takes_no_part(variant: str, bad: Callable[..., None]) -> None:
    """Of two micro-batches one is bad: as if it had not been, but for a warning; the base gets a zero from it."""
    found = []
    for meets_it in (True, False):
        optimizer = wrap(variant, mlp())
        data = list(batches(7))
        for batch in data[:4]:
            step(optimizer, *batch)
        optimizer.zero_grad()
        backward(optimizer, *data[4])
        if meets_it:
            good = [parameter.grad.clone() for parameter in optimizer.model.parameters()]
            bad(optimizer, *data[5])
            for parameter, gradient in zip(optimizer.model.parameters(), good, strict=True):
                parameter.grad.copy_(gradient)
            with pytest.warns(UserWarning, match="not finite"):
                optimizer.step()
        else:
            optimizer.step()
        step(optimizer, *data[6])
        found.append(optimizer)
    assert_same_training(*found)
    assert all(bool(tensor.isfinite().all()) for tensor in learned(found[0]).values())
