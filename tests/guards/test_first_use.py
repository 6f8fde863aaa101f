"""What a newcomer gets wrong is said: once, in three lines at most, with the cause that was seen and the fix."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_same, backward, batches, mlp, one, sgd, train
from tests.reference import EACH, train_by_closures, wrap


def is_short(message):
    lines = message.splitlines()
    return len(lines) <= 3 and max(map(len, lines)) <= 200


# ---- the base optimizer is stepped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@EACH
def test_two_steps_of_the_base_itself_are_an_error_in_the_next_forward_pass(variant, to_none):
    model = mlp()
    base = sgd(model)
    optimizer = wrap(variant, model, base)

    def step():
        base.zero_grad(to_none)
        backward(model, *one())
        base.step()

    step()
    step()
    before = copy.deepcopy(model.state_dict())
    message = rf"twice.*{type(optimizer).__name__}.*SGD was stepped.*\n  Fix: .*step\(\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        step()
    assert_same(model.state_dict(), before)
    assert is_short(str(caught.value))
    assert optimizer.logs()["step"] == 0


# ---- a step without a backward pass ----------------------------------------------------------------------------------


def stepped_twice(model, optimizer):
    """As for a step of weight decay alone."""
    train(model, optimizer, batches(1))
    optimizer.step()


def loaded_in_between(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, *one())
    optimizer.load_state_dict(state)
    optimizer.step()


def in_eval_mode(model, optimizer):
    train(model.eval(), optimizer, batches(1))


def forward_called(model, optimizer):
    train(model.forward, optimizer, batches(1))


def second_gradient(model, optimizer):
    x, y = one()
    loss = F.cross_entropy(model(x), y)
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, model.parameters(), create_graph=True), strict=True
    ):
        parameter.grad = gradient.detach()
    optimizer.step()


def other_logits(model, optimizer):
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
@EACH
def test_a_step_without_a_regularized_gradient_says_what_was_seen(variant, misuse, cause):
    model = mlp()
    optimizer = wrap(variant, model)
    with pytest.raises(RuntimeError, match=rf"(?s)no backward.*training forward.*{cause}") as caught:
        misuse(model, optimizer)
    assert len(str(caught.value).splitlines()) == 3


def test_a_step_without_a_training_forward_changes_nothing_also_with_a_closure_and_a_dry_one_is_none():
    model = mlp().eval()
    optimizer = wrap("dcl", model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"(?s)found gradients, but no backward.*strict=False"):
        optimizer.step(lambda: backward(model, *one()))
    assert_same(model.state_dict(), before)
    optimizer.zero_grad()
    optimizer.step()  # nothing to step on: as in torch.optim

    backward(model, *one())
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()  # as torch.distributed.checkpoint takes it


@EACH
def test_lbfgs_refuses_the_line(variant):
    model = mlp()
    companion = {"companion_optimizer": torch.optim.SGD} if variant == "dcl" else {}
    optimizer = wrap(variant, model, torch.optim.LBFGS(model.parameters()), **companion)
    with pytest.raises(RuntimeError, match=r"(?s)LBFGS.*optimizer\.penalty\("):
        train_by_closures(optimizer, batches(1), F.cross_entropy, way="line")
    assert_same(optimizer.model, mlp())
