"""Several backward passes through one forward pass: each carries the penalty once, the forecaster learns once."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from tests.helpers import CLASSES, assert_same, batches, cells, dropout_net, mlp, one, sgd, training_forwards

WRAPPERS: dict[str, Callable[..., Any]] = {
    "dcl": lambda model: DCLOptimizer(sgd(model), model, weight=2.0),
    "dcl given": lambda model: DCLOptimizer(sgd(model), model, weight=2.0, loss_scale=3.0),
    "dcl kl": lambda model: DCLOptimizer(sgd(model), model, weight=2.0, distance="kl"),
    "dcp": lambda model: DCPOptimizer(sgd(model), model, CLASSES, weight=2.0),
    "plain": lambda model: sgd(model),
}


class Squares(nn.Module):
    """A loss whose gradient does not tell its factor."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, F.one_hot(y, CLASSES).to(z))


def penalty_gradient(z: Tensor, c: Tensor, weight: float = 2.0) -> Tensor:
    """By hand: the gradient of λ times the mean of squares."""
    return weight * 2 * (z.detach() - c.detach()) / z.numel()


def held_apart(**options: Any) -> tuple[nn.Sequential, DCLOptimizer]:
    """A model and a companion that differ, so that the first batch has a penalty."""
    model = mlp()
    return model, DCLOptimizer(sgd(model), model, **{"weight": 2.0, "companion": lambda: mlp(seed=1)} | options)


# ---- gradients that the script asks for before its backward ----------------------------------------------------------


def asks_for_nothing(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    pass


def asks_for_the_head(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    torch.autograd.grad(loss, model[-1].weight, retain_graph=True)


def asks_for_logits(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    torch.autograd.grad(7 * loss, z, retain_graph=True)


def asks_twice(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    asks_for_logits(loss, z, model, optimizer)
    asks_for_the_head(loss, z, model, optimizer)


def clears_after_asking(loss: Tensor, z: Tensor, model: nn.Sequential, optimizer: Any) -> None:
    asks_for_the_head(loss, z, model, optimizer)
    optimizer.zero_grad()


def trained(wrapper: str, ask: Callable[..., None], build: Callable[[], nn.Sequential]) -> tuple[nn.Module, Any]:
    model, criterion = build(), nn.CrossEntropyLoss()
    optimizer = WRAPPERS[wrapper](model)
    for x, y in batches(6):
        optimizer.zero_grad()
        z = model(x)
        loss = 3 * criterion(z, y)
        ask(loss, z, model, optimizer)
        loss.backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("build", "wrapper", "ask"),
    cells(
        itertools.product(
            [mlp, dropout_net], WRAPPERS, [asks_for_the_head, asks_for_logits, asks_twice, clears_after_asking]
        ),
        (mlp, "dcl", asks_for_the_head),
        (dropout_net, "dcl", asks_twice),
        (mlp, "dcl given", asks_for_logits),
        (dropout_net, "dcl given", clears_after_asking),
        (mlp, "dcl kl", asks_for_logits),
        (mlp, "dcp", asks_twice),
        (mlp, "dcp", clears_after_asking),
        (dropout_net, "dcp", asks_for_logits),
        (mlp, "plain", asks_twice),
    ),
)
def test_training_is_the_same_whether_or_not_gradients_were_asked_for_before(build, wrapper, ask):
    model, optimizer = trained(wrapper, asks_for_nothing, build)
    other, asking = trained(wrapper, ask, build)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(asking.state_dict(), optimizer.state_dict())
    if wrapper != "plain":
        assert asking.logs() == optimizer.logs()
        assert asking.penalty > 0


@pytest.mark.parametrize("retain", [True, False], ids=["graph kept", "graph freed"])
@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_gradients_that_the_script_asks_for_carry_the_penalty(factor, retain):
    model, optimizer = held_apart()
    x, y = one()
    z = model(x)
    loss = factor * F.cross_entropy(z, y)
    gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=retain)
    plain = mlp()
    z = plain(x)
    by_hand = F.cross_entropy(z, y) + 2.0 * F.mse_loss(z, optimizer.companion(x).detach())
    assert_same(gradients, torch.autograd.grad(factor * by_hand, [*plain.parameters()]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrapper", ["dcl", "dcl given", "dcp"])
def test_gradients_that_the_script_puts_in_place_itself(wrapper):
    """As gradient surgery does: no backward comes, and the one whose graph was kept has brought the penalty."""

    def grad(loss: Tensor, model: nn.Module) -> None:
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()], retain_graph=True), strict=True
        ):
            parameter.grad = gradient

    runs = []
    for backward in (lambda loss, model: loss.backward(), grad):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = WRAPPERS[wrapper](model)
        for x, y in batches(6):
            optimizer.zero_grad()
            backward(criterion(model(x), y), model)
            optimizer.step()
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_same(runs[0], runs[1])


def test_a_backward_that_ends_before_the_logits_leaves_no_factor_to_the_next():

    class Learned(nn.CrossEntropyLoss):
        def __init__(self) -> None:
            super().__init__()
            self.sigma = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return super().forward(z, y) / self.sigma

    module = Learned()
    model, optimizer = held_apart()
    x, y = one()
    loss = module(model(x), y)
    torch.autograd.grad(loss, module.sigma, retain_graph=True)
    assert math.isnan(optimizer.logs()["penalty"])
    loss.backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)


@pytest.mark.parametrize("clears", ["before", "after", "zeros after"])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_gradient_surgery_carries_the_penalty_in_each_gradient(variant, clears):
    """PCGrad and its like ask for a gradient of each loss, and make of them the one that is stepped."""
    x, y = one()
    other = (y + 1) % CLASSES
    found = []
    for asks in (False, True):
        model = mlp()
        if variant == "dcl":
            optimizer: Any = DCLOptimizer(sgd(model), model, weight=2.0, companion=lambda: mlp(seed=1))
        else:
            optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=2.0)
        for _ in range(3):
            if variant == "dcp":
                optimizer.set_targets(y)
            if not asks or clears == "before":
                optimizer.zero_grad()
            z, parameters = model(x), [*model.parameters()]
            losses = [2 * F.cross_entropy(z, y), 0.5 * F.cross_entropy(z, other)]
            if asks:
                gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
                if clears != "before":
                    optimizer.zero_grad(set_to_none=clears == "after")
                for parameter, *parts in zip(parameters, *gradients, strict=True):
                    parameter.grad = sum(parts)
            else:
                for loss in losses:
                    loss.backward(retain_graph=True)
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found, rtol=1e-9, atol=1e-12)


# ---- gradients that reach no parameter: attacks ----------------------------------------------------------------------


def by_grad(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0]


def by_inputs(loss: Tensor, x: Tensor) -> Tensor:
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


def by_frozen(loss: Tensor, x: Tensor) -> Tensor:
    loss.backward()
    assert x.grad is not None
    return x.grad


def attacked(model: nn.Module, x: Tensor, y: Tensor, how: Callable[[Tensor, Tensor], Tensor], steps: int = 2) -> Tensor:
    """Projected gradient descent on the inputs, through the model as it trains."""
    trained, batch = [p for p in model.parameters() if p.requires_grad], x
    for _ in range(steps):
        batch = batch.detach().clone().requires_grad_()
        for parameter in trained:
            parameter.requires_grad_(how is not by_frozen)
        gradient = how(F.cross_entropy(model(batch), y), batch)
        for parameter in trained:
            parameter.requires_grad_()
        batch = batch + 0.1 * gradient.sign() + 0.01 * gradient
    return batch.detach()


@pytest.mark.parametrize(
    ("wrapper", "when", "how"),
    cells(
        itertools.product(
            ["dcl", "dcl given", "dcp"],
            ["before", "between", "after"],
            [by_grad, by_inputs, by_frozen],
        ),
        ("dcl", "before", by_grad),
        ("dcl", "between", by_inputs),
        ("dcl", "after", by_frozen),
        ("dcl given", "between", by_grad),
        ("dcl given", "before", by_frozen),
        ("dcp", "before", by_inputs),
        ("dcp", "between", by_frozen),
        ("dcp", "after", by_grad),
    ),
)
def test_an_attack_sees_the_scripts_loss_and_teaches_nothing(wrapper, when, how):
    """As if a copy of the model, which has no penalty, had been attacked: to the last bit."""
    found = []
    for on_model in (True, False):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = WRAPPERS[wrapper](model)
        for x, y in batches(4):

            def attack(x: Tensor = x, y: Tensor = y) -> Tensor:
                return attacked(model if on_model else copy.deepcopy(model), x, y, how)  # noqa: B023

            optimizer.zero_grad()
            if when == "before":
                criterion(model(attack()), y).backward()
            else:
                criterion(model(x), y).backward()
                adversarial = attack()
                if when == "between":
                    criterion(model(adversarial), y).backward()
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_an_attack_on_an_output_that_is_trained_on_afterwards():
    """One forward serves both."""
    x, y = one()
    gradients = []
    for attacks in (False, True):
        model, optimizer = held_apart()
        before = copy.deepcopy(optimizer.companion.state_dict())
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(model(x), y)
        if attacks:
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            of_loss = torch.autograd.grad(F.cross_entropy(mlp()(x), y), x)[0]
            assert torch.equal(found, of_loss)
            assert math.isnan(optimizer.logs()["penalty"])
        loss.backward(inputs=[*model.parameters()])
        gradients.append([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        assert not torch.equal(optimizer.companion[0].weight, before["0.weight"])
        gradients.append([*optimizer.companion.parameters()])
    assert_same(gradients[:2], gradients[2:])


def test_a_closure_that_attacks_and_leaves_its_backward_to_the_optimizer():
    x, y = one()
    found = []
    for attacks in (False, True):
        model, optimizer = held_apart()

        def closure(model: nn.Module = model, attacks: bool = attacks) -> Tensor:
            adversarial = attacked(model if attacks else mlp(), x, y, by_grad)
            return F.cross_entropy(model(adversarial), y)

        optimizer.step(closure)
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_all_parameters_behind_checkpoints(reentrant):
    """A reentrant checkpoint gives them their gradients in a backward of its own, inside of the one that is counted."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    found = []
    for kind in (nn.Sequential, Checkpointed):
        model = kind(*mlp())
        optimizer = DCLOptimizer(sgd(model), model, weight=2.0, companion=lambda: mlp(seed=1))
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x.requires_grad_()), y).backward()
            optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("outside", [True, False], ids=["model in a checkpoint", "attack alone"])
def test_an_attack_through_a_checkpointed_model_recomputes_no_training_forward(outside):
    x, y = one()
    model, optimizer = held_apart()
    x, forwards = x.requires_grad_(), training_forwards(optimizer)
    z = checkpoint(model, x, use_reentrant=False) if outside else model(x)
    torch.autograd.grad(F.cross_entropy(z, y), x)
    assert len(forwards) == 1
    assert math.isnan(optimizer.logs()["penalty"])


# ---- several backwards that all add to the parameters' gradients -----------------------------------------------------


def halves(criterion: nn.Module, z: Tensor, y: Tensor, when: str, parts: tuple[float, ...], **inputs: Any) -> None:
    """Parts of one loss, each with its own backward; the criterion is called for all of them first, or in between."""
    losses = (part * criterion(z, y) for part in parts)
    for loss in list(losses) if when == "called first" else losses:
        loss.backward(retain_graph=True, **inputs)


@pytest.mark.parametrize(
    ("build", "when", "inputs"),
    cells(
        itertools.product([nn.CrossEntropyLoss, Squares], ["called first", "called in between"], [False, True]),
        (nn.CrossEntropyLoss, "called first", False),
        (nn.CrossEntropyLoss, "called in between", False),
        (nn.CrossEntropyLoss, "called in between", True),
        (Squares, "called first", True),
        (Squares, "called in between", False),
    ),
)
def test_parts_of_a_loss_together_carry_the_whole_penalty(build, when, inputs):
    found, criterion = [], build()
    for parts in ((1.0,), (0.5, 0.5), (0.25, 0.6, 0.15)):
        told = iter(parts)
        model, optimizer = held_apart(**{"loss_scale": functools.partial(next, told)} if build is Squares else {})
        x, y = one()
        halves(criterion, model(x), y, when, parts, **({"inputs": [*model.parameters()]} if inputs else {}))
        assert optimizer.logs()["loss_scale"] == pytest.approx(parts[-1])
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        found.append((gradients, model.state_dict(), optimizer.companion.state_dict()))
    assert_same(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert_same(found[2], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("labels", "distance"),
    cells(
        itertools.product(["read", "set_targets", "soft", "ignored"], distances.DISTANCES),
        *(("read", "mse"), ("set_targets", "infonce"), ("soft", "kl"), ("soft", "mse"), ("ignored", "l1")),
    ),
)
def test_prototypes_too_carry_the_whole_penalty_in_parts(labels, distance):
    """The second backward sees the logits, and the labels, as the first one did."""
    found = []
    for parts in ((1.0,), (0.5, 0.5)):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=2.0, distance=distance)
        for x, y in batches(4):
            y = y.where(y != 0, -100) if labels == "ignored" else y
            optimizer.zero_grad()
            if labels == "soft":
                optimizer.set_targets(0.9 * F.one_hot(y, CLASSES) + 0.1 / CLASSES)
            elif labels != "read":
                optimizer.set_targets(y)
            halves(criterion, model(x), y, "called in between", parts)
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((model.state_dict(), optimizer.prototypes, optimizer.penalty))
    assert_same(*found, rtol=1e-9, atol=1e-12)


def test_parts_of_the_models_own_loss_carry_the_whole_penalty():
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_of = mlp(), Squares()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            z = self.net(x)
            return {"loss": self.loss_of(z, labels), "logits": z}

    found = []
    for parts in ((1.0,), (0.5, 0.5)):
        model = WithLoss()
        optimizer = DCLOptimizer(sgd(model), model, weight=2.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            loss = model(x, y)["loss"]
            for part in parts:
                (part * loss).backward(retain_graph=True)
            optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found, rtol=1e-9, atol=1e-12)


def gradients_of_two_terms(together: bool, **options: Any) -> list[Tensor]:
    model, _ = held_apart(**options)
    x, y = one()
    z = model(x)
    terms = Squares()(z, y), z.square().mean()
    for loss in [sum(terms)] if together else terms:
        loss.backward(retain_graph=True)
    return [parameter.grad for parameter in model.parameters()]


def test_two_losses_whose_factor_cannot_be_read_carry_the_penalty_twice_unless_they_are_told():
    """Each is taken for a whole loss, which a warning says; a callable can tell the factor of each."""
    with pytest.warns(UserWarning, match=r"(?s)cannot be read from this loss's gradient.*pass .*loss_scale="):
        twice = gradients_of_two_terms(together=False)
    assert_same(twice, gradients_of_two_terms(together=True, loss_scale=2.0), rtol=1e-10, atol=1e-12)
    expected = gradients_of_two_terms(together=True)
    assert_same(gradients_of_two_terms(together=False, loss_scale=0.5), expected, rtol=1e-10, atol=1e-12)
    factors = iter([0.9, 0.1])
    found = gradients_of_two_terms(together=False, loss_scale=lambda: next(factors))
    assert_same(found, expected, rtol=1e-10, atol=1e-12)


# ---- logits that were converted --------------------------------------------------------------------------------------


class Converting(nn.Module):
    """Returns its logits converted, beside the original ones, which a model's own loss is taken from."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.body = mlp(seed)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        original = self.body(x)
        return {"original": original, "logits": original.float()}


@pytest.mark.parametrize("which", [("original",), ("logits",), ("original", "logits")], ids="+".join)
@pytest.mark.parametrize("asks", [True, False], ids=["asks before", "asks nothing"])
def test_a_backward_through_converted_logits_carries_the_penalty_once(asks, which):
    """Its gradient passes two places where the penalty can be added; each backward has it at one of them."""
    model, hand = Converting(), mlp()
    optimizer = DCLOptimizer(sgd(model), model, weight=2.0, companion=lambda: Converting(seed=1), loss_scale=1.0)
    x, y = one()
    output, parameters, found = model(x), [*model.parameters()], []
    loss = sum(F.cross_entropy(output[name], y) for name in which)
    if asks:
        found.append(list(torch.autograd.grad(loss, parameters, retain_graph=True)))
    loss.backward()
    found.append([parameter.grad for parameter in parameters])

    z = hand(x)
    expected = len(which) * F.cross_entropy(z, y) + 2.0 * F.mse_loss(z, optimizer.companion.body(x).detach())
    expected.backward()
    for gradients in found:
        assert_same(gradients, [parameter.grad for parameter in hand.parameters()], rtol=1e-4, atol=1e-6)


# ---- what counts, and what is learned from ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_forward_counts_once_and_is_learned_from_once(variant):
    """As if its last backward had not come: the second one changes neither the companion nor the prototypes."""
    found = []
    for times in (1, 3):
        model = mlp()
        if variant == "dcl":
            optimizer = DCLOptimizer(sgd(model), model, companion=lambda: mlp(seed=1), loss_scale=1.0)
        else:
            optimizer = DCPOptimizer(sgd(model), model, CLASSES, loss_scale=1.0)
            optimizer.set_targets(one()[1])
        z = model(one()[0])
        for _ in range(times):
            optimizer.zero_grad()
            F.cross_entropy(z, one()[1]).backward(retain_graph=True)
        optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_a_graph_kept_over_several_steps_carries_the_penalty_in_each_and_is_learned_from_in_the_first():
    model, optimizer = held_apart(loss_scale=1.0)
    x, y = one()
    c = optimizer.companion(x).detach()
    z = model(x)
    kept = z.detach().clone()
    companions = []
    for _ in range(3):
        optimizer.zero_grad()
        leaf = kept.clone().requires_grad_()
        (of_loss,) = torch.autograd.grad(F.cross_entropy(leaf, y), leaf)
        parameter = model[-1].bias  # what lies behind a weight autograd refuses, since the step has changed that
        F.cross_entropy(z, y).backward(retain_graph=True, inputs=[parameter])
        expected = (of_loss + penalty_gradient(kept, c)).sum(0)
        assert_same(parameter.grad, expected, rtol=1e-9, atol=1e-12)
        before = parameter.detach().clone()
        optimizer.step()
        assert not torch.equal(parameter, before)
        companions.append(copy.deepcopy(optimizer.companion.state_dict()))
    assert not torch.equal(companions[0]["2.bias"], mlp(seed=1)[-1].bias)
    assert_same(companions[1:], [companions[0]] * 2)
    assert optimizer.logs()["step"] == 3


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_under_activation_checkpointing(variant):
    """The recomputation inside the second backward is no forward either."""
    found = []
    for checkpointed in (False, True):
        model = dropout_net()
        options = {"loss_scale": 0.5, "weight": 2.0}
        if variant == "dcl":
            optimizer = DCLOptimizer(sgd(model), model, **options)
        else:
            optimizer = DCPOptimizer(sgd(model), model, CLASSES, **options)
        torch.manual_seed(0)
        for x, y in batches(4):
            optimizer.zero_grad()
            if variant == "dcp":
                optimizer.set_targets(y)
            z = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            for part in (0.25, 0.75):
                (part * F.cross_entropy(z, y)).backward(retain_graph=True)
            optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def evaluated(model: nn.Sequential, optimizer: Any, x: Tensor, y: Tensor, asks: bool) -> Tensor:
    """What a script's closure does."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if asks:
        torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    loss.backward()
    return loss


def test_in_a_closure():
    """Its gradients may be asked for there too; the closure's forward is learned from once."""
    found = []
    for asks in (False, True):
        model, optimizer = held_apart()
        for x, y in batches(4):
            optimizer.step(functools.partial(evaluated, model, optimizer, x, y, asks))
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found)
