"""What a newcomer gets wrong is said: once, in three lines at most, with the cause that was seen and the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, backward, batches, mlp, one, sgd, train

WRAPPERS = [DCLOptimizer, DCPOptimizer]


def is_short(message: str) -> bool:
    lines = message.splitlines()
    return len(lines) <= 3 and max(map(len, lines)) <= 200


# ---- the base optimizer is stepped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_steps_of_the_base_itself_are_an_error_in_the_next_forward_pass(wrapper: Any, to_none: bool) -> None:
    model = mlp()
    base = sgd(model)
    optimizer = wrapper(base, model)

    def step() -> None:
        base.zero_grad(to_none)
        backward(model, *one())
        base.step()

    step()
    step()
    before = copy.deepcopy(model.state_dict())
    message = rf"twice.*{wrapper.__name__}.*SGD was stepped.*\n  Fix: .*step\(\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        step()
    assert_same(model.state_dict(), before)
    assert is_short(str(caught.value))
    assert optimizer.logs()["step"] == 0


# ---- softmax before the loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_softmax_layer_before_cross_entropy_is_said_once(wrapper: Any) -> None:
    model = mlp().append(nn.Softmax(1))
    optimizer = wrapper(sgd(model), model)
    with pytest.warns(UserWarning, match=r"probabilities.*softmax.*\n  Fix: .*See docs/troubleshooting\.md") as caught:
        train(model, optimizer, batches(3))
    assert len(caught) == 1
    assert is_short(str(caught[0].message))


@pytest.mark.parametrize("last", [nn.LogSoftmax(1), nn.Sigmoid(), nn.ReLU()])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_layers_before_it_are_not(wrapper: Any, last: nn.Module) -> None:
    model = mlp().append(last)
    train(model, wrapper(sgd(model), model), batches(3))


# ---- losses that cannot be read --------------------------------------------------------------------------------------


def binary(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z))


def mixed(z: Tensor, y: Tensor) -> Tensor:
    return 0.6 * F.cross_entropy(z, y) + 0.4 * F.cross_entropy(z, y.flip(0))


def with_weights(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, torch.linspace(0.5, 2.0, z.shape[1]).to(z), label_smoothing=0.1)


NOT_0, IS_0 = (
    "do not sum to 0, as of sigmoid outputs, probabilities, regression",
    "rows have different factors, as with class weights",
)
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Module], str]] = {
    "sigmoid": (binary, [], NOT_0),
    "one logit": (lambda z, y: F.mse_loss(z[:, 0], y.double()), [nn.Linear(5, 1).double()], "one logit a row"),
    "nll": (F.nll_loss, [], NOT_0),
    "hidden states": (  # as F.linear_cross_entropy takes
        lambda h, y: F.cross_entropy(F.linear(h, torch.ones(7, h.shape[1]).tril().to(h)), y),
        [],
        "do not sum to 0, as of .*hidden states that the loss takes to the last layer",
    ),
    "temperature": (lambda z, y: F.cross_entropy(z / 2, y), [], IS_0),
    "class weights with smoothing": (with_weights, [], IS_0),
    "three classes, mixed": (mixed, [nn.Linear(5, 3).double()], IS_0),
    "two classes, mixed": (mixed, [nn.Linear(5, 2).double()], IS_0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_read_is_an_error_with_what_was_seen_and_the_term(name: str) -> None:
    loss, layers, seen = LOSSES[name]
    torch.manual_seed(0)
    model = mlp().extend(layers)
    optimizer = DCPOptimizer(sgd(model), model)
    x, y = one()
    value = loss(model(x), y % min(3, model(x).shape[1]))
    fix = r"loss \+ optimizer\.penalty\(logits, labels\)"
    message = rf"cannot read the labels.*\n  Seen: .*{seen}.*\n  Fix: .*{fix}.*\. See docs/losses\.md"
    with pytest.raises(RuntimeError, match=message) as caught:
        value.backward()
    assert is_short(str(caught.value))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (optimizer.logs()["step"], optimizer.prototypes.numel()) == (0, 0)


# ---- a step without a backward pass ----------------------------------------------------------------------------------


def stepped_twice(model: Any, optimizer: Any) -> None:
    """As for a step of weight decay alone."""
    train(model, optimizer, batches(1))
    optimizer.step()


def loaded_in_between(model: Any, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, *one())
    optimizer.load_state_dict(state)
    optimizer.step()


def in_eval_mode(model: Any, optimizer: Any) -> None:
    train(model.eval(), optimizer, batches(1))


def forward_called(model: Any, optimizer: Any) -> None:
    train(model.forward, optimizer, batches(1))


def second_gradient(model: Any, optimizer: Any) -> None:
    x, y = one()
    loss = F.cross_entropy(model(x), y)
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, model.parameters(), create_graph=True), strict=True
    ):
        parameter.grad = gradient.detach()
    optimizer.step()


def other_logits(model: Any, optimizer: Any) -> None:
    x, y = one()
    model(x)
    backward(nn.Sequential(*model), x, y)
    optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "cause"),
    [
        (stepped_twice, "step was called twice.*\n  Fix: call step once"),
        (loaded_in_between, "no training forward pass"),
        (in_eval_mode, r"\n  Seen: the model is in eval mode.\n  Fix: call model.train\(\)"),
        (forward_called, "Seen: .*another method"),
        (second_gradient, "create_graph=True"),
        (other_logits, "gradient did not come through.*logits=.*optimizer.penalty"),
    ],
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_without_a_regularized_gradient_says_what_was_seen(wrapper: Any, misuse: Any, cause: str) -> None:
    model = mlp()
    optimizer = wrapper(sgd(model), model)
    with pytest.raises(RuntimeError, match=rf"(?s)no backward.*training forward.*{cause}") as caught:
        misuse(model, optimizer)
    assert len(str(caught.value).splitlines()) == 3


# ---- the constructor -------------------------------------------------------------------------------------------------


def test_a_name_may_be_asked_for_before_the_constructor() -> None:
    class Flagged(DCPOptimizer):
        def __init__(self, *arguments: Any) -> None:
            self.had_flag = hasattr(self, "flag")
            super().__init__(*arguments)

    model = mlp()
    assert not Flagged(sgd(model), model).had_flag
