"""The gradient of the logits: which backward passes carry the penalty, how often, and which are left alone."""

from __future__ import annotations

import copy
import linecache
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dcl_optim import DCLOptimizer, DCPOptimizer, reference
from dcl_optim.distances import mse
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    backward,
    batch_norm_net,
    batches,
    dropout_net,
    mlp,
    one,
    sgd,
    train,
    training_forwards,
    wrap,
)

VARIANTS = ["dcl", "dcp"]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


WRAPPERS: dict[str, Callable[..., Any]] = {
    "dcl": lambda model: DCLOptimizer(sgd(model), model, weight=2.0),
    "dcl given": lambda model: DCLOptimizer(sgd(model), model, weight=2.0, loss_scale=3.0),
    "dcl kl": lambda model: DCLOptimizer(sgd(model), model, weight=2.0, distance="kl"),
    "dcp": lambda model: DCPOptimizer(sgd(model), model, CLASSES, weight=2.0),
}


class Squares(nn.Module):
    """A loss whose gradient does not tell its factor."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, F.one_hot(y, CLASSES).to(z))


def model_and_other_companion(**options: Any) -> tuple[nn.Sequential, DCLOptimizer]:
    """A model and a companion that differ, so that the first batch has a penalty."""
    model = mlp()
    return model, DCLOptimizer(sgd(model), model, **{"weight": 2.0, "companion": lambda: mlp(seed=1)} | options)


# ---- forward passes that are left alone ------------------------------------------------------------------------------


def test_evaluation_is_left_alone():
    model = batch_norm_net()
    optimizer = wrap(model)
    companion = copy.deepcopy(optimizer.companion.state_dict())
    x, _ = one()
    stream = torch.get_rng_state()
    with torch.no_grad():
        model(x)
    model.eval()
    model(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), stream)
    assert_same(optimizer.companion.state_dict(), companion)
    assert math.isnan(optimizer.logs()["penalty"])


def test_gradients_inside_the_loss_are_left_alone():
    """A gradient penalty asks for d loss / d x with create_graph; only the outer backward is regularized."""
    model = mlp()
    optimizer = wrap(model, weight=5.0, companion=mlp(seed=3))
    x, y = one()
    x.requires_grad_()
    z = model(x)
    (inner,) = torch.autograd.grad(F.cross_entropy(z, y), x, create_graph=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(mlp()(x), y), x)
    assert_same(inner.detach(), expected, rtol=1e-12, atol=1e-14)
    assert math.isnan(optimizer.logs()["penalty"])
    (F.cross_entropy(z, y) + inner.square().sum()).backward()
    assert optimizer.logs()["penalty"] > 0


def test_inputs_that_need_gradients_get_only_the_models():
    model, x = mlp(), torch.randn(4, FEATURES, dtype=torch.float64, requires_grad=True)
    optimizer = wrap(model, weight=0.0, companion=mlp(seed=3))
    backward(model, x, torch.arange(4))
    optimizer.step()
    (expected,) = torch.autograd.grad(F.cross_entropy(mlp()(x), torch.arange(4)), x)
    assert_same(x.grad, expected)


def test_gradients_by_torch_func_are_left_alone_and_a_step_on_them_says_so():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(values):
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    found = torch.func.grad(loss)(parameters)
    model_alone = mlp()
    backward(model_alone, x, y)
    for name, parameter in model_alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]
    with pytest.raises(RuntimeError, match=r"or torch\.func was used"):
        optimizer.step()


def test_a_model_that_is_frozen_for_now_adds_nothing_to_what_comes_through_it():
    """A discriminator inside its generator's loss: the generator's gradient is the plain one."""
    generator, discriminator = nn.Linear(3, FEATURES).double(), mlp()
    optimizer = wrap(discriminator)
    companion = copy.deepcopy(optimizer.companion)
    z, (_, y) = torch.randn(16, 3, dtype=torch.float64), one()
    discriminator.requires_grad_(False)
    backward(discriminator, generator(z), y)
    discriminator.requires_grad_(True)
    alone = mlp()
    expected = copy.deepcopy(generator)
    expected.zero_grad()
    backward(alone, expected(z), y)
    assert torch.equal(generator.weight.grad, expected.weight.grad)
    assert_same(optimizer.companion, companion)
    train(discriminator, optimizer, batches(1))
    assert optimizer.logs()["step"] == 1


def test_in_place_edits_of_the_logits():
    results = []
    for in_place in (False, True):
        model = mlp()
        optimizer = wrap(model, companion=mlp(seed=3), loss_scale=1.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            z = z.div_(2.0) if in_place else z / 2.0
            F.cross_entropy(z, y).backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_backward_after_detach_has_no_penalty(variant):
    model = mlp()
    optimizer = WRAPPERS[variant](model)
    train(model, optimizer, batches(2))
    alone = copy.deepcopy(model)
    loss = F.cross_entropy(model(one()[0]), one()[1])
    optimizer.detach()
    for network in (model, alone):
        network.zero_grad()
    loss.backward()
    backward(alone, *one())
    assert_same([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


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
    model = build()
    optimizer = WRAPPERS[wrapper](model)
    for x, y in batches(6):
        optimizer.zero_grad()
        z = model(x)
        loss = 3 * F.cross_entropy(z, y)
        ask(loss, z, model, optimizer)
        loss.backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("build", "wrapper", "ask"),
    [
        (mlp, "dcl", asks_for_the_head),
        (dropout_net, "dcl", asks_twice),
        (mlp, "dcl given", asks_for_logits),
        (dropout_net, "dcl given", clears_after_asking),
        (mlp, "dcl kl", asks_for_logits),
        (mlp, "dcp", asks_twice),
        (mlp, "dcp", clears_after_asking),
        (dropout_net, "dcp", asks_for_logits),
    ],
)
def test_training_is_the_same_whether_or_not_gradients_were_asked_for_before(build, wrapper, ask):
    model, optimizer = trained(wrapper, asks_for_nothing, build)
    other, asking = trained(wrapper, ask, build)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(asking.state_dict(), optimizer.state_dict())
    assert asking.logs() == optimizer.logs()
    assert asking.penalty > 0


@pytest.mark.parametrize("retain", [True, False], ids=["graph kept", "graph freed"])
@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_gradients_that_the_script_asks_for_carry_the_penalty(factor, retain):
    model, optimizer = model_and_other_companion()
    x, y = one()
    z = model(x)
    loss = factor * F.cross_entropy(z, y)
    gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=retain)
    plain = mlp()
    z = plain(x)
    by_hand = F.cross_entropy(z, y) + 2.0 * F.mse_loss(z, optimizer.companion(x).detach())
    assert_same(gradients, torch.autograd.grad(factor * by_hand, [*plain.parameters()]), **CLOSE)


@pytest.mark.parametrize("wrapper", ["dcl", "dcl given", "dcp"])
def test_gradients_that_the_script_puts_in_place_itself(wrapper):
    """As gradient surgery does: no backward comes, and the one whose graph was kept has brought the penalty."""

    def grad(loss: Tensor, model: nn.Module) -> None:
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()], retain_graph=True), strict=True
        ):
            parameter.grad = gradient

    runs = []
    for bring in (lambda loss, model: loss.backward(), grad):
        model = mlp()
        optimizer = WRAPPERS[wrapper](model)
        for x, y in batches(6):
            optimizer.zero_grad()
            bring(F.cross_entropy(model(x), y), model)
            optimizer.step()
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_same(runs[0], runs[1])


def test_a_backward_that_ends_before_the_logits_is_left_alone():
    model, optimizer = model_and_other_companion()
    x, y = one()
    sigma = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(model(x), y) / sigma
    torch.autograd.grad(loss, sigma, retain_graph=True)
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
    assert_same(*found, **CLOSE)


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
    [
        ("dcl", "before", by_grad),
        ("dcl", "between", by_inputs),
        ("dcl", "after", by_frozen),
        ("dcl given", "between", by_grad),
        ("dcl given", "before", by_frozen),
        ("dcp", "before", by_inputs),
        ("dcp", "between", by_frozen),
        ("dcp", "after", by_grad),
    ],
)
def test_an_attack_sees_the_scripts_loss_and_is_not_learned_from(wrapper, when, how):
    """Bit for bit as if a copy of the model, which has no penalty, had been attacked."""
    found = []
    for on_model in (True, False):
        model = mlp()
        optimizer = WRAPPERS[wrapper](model)
        for x, y in batches(4):

            def attack(x: Tensor = x, y: Tensor = y) -> Tensor:
                return attacked(model if on_model else copy.deepcopy(model), x, y, how)  # noqa: B023

            optimizer.zero_grad()
            if when == "before":
                backward(model, attack(), y)
            else:
                backward(model, x, y)
                adversarial = attack()
                if when == "between":
                    backward(model, adversarial, y)
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_an_attack_on_an_output_that_is_trained_on_afterwards():
    """One forward serves both."""
    x, y = one()
    gradients = []
    for attacks in (False, True):
        model, optimizer = model_and_other_companion()
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
        model, optimizer = model_and_other_companion()

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
    model, optimizer = model_and_other_companion()
    x, forwards = x.requires_grad_(), training_forwards(optimizer)
    z = checkpoint(model, x, use_reentrant=False) if outside else model(x)
    torch.autograd.grad(F.cross_entropy(z, y), x)
    assert len(forwards) == 1
    assert math.isnan(optimizer.logs()["penalty"])


# ---- several backward passes that all add to the parameters' gradients -----------------------------------------------


def test_two_backwards_of_one_forward_each_carry_their_own_factor():
    results = []
    for split in (False, True):
        model = mlp()
        optimizer = wrap(model, loss_scale=0.5 if split else 1.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            first, second = F.cross_entropy(z, y), z.square().mean()
            if split:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_loss_that_go_backward_one_by_one_carry_the_whole_penalty(variant, shares):
    model, hand = mlp(), mlp()
    companion, prototypes, numbers = mlp(seed=3), dict[int, Tensor](), dict[int, float]()
    if variant == "dcl":
        given = copy.deepcopy(companion)
        optimizer = DCLOptimizer(sgd(model), model, companion=given, weight=2.0, alpha=0.6)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=2.0, alpha=0.6)
    base, second = sgd(hand), sgd(companion)
    settings = {"weight": 2.0, "alpha": 0.6}
    for x, y in batches(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (shares[0] * loss).backward(retain_graph=True)
        (shares[1] * loss).backward()
        optimizer.step()
        if variant == "dcl":
            reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, mse, **settings)
        else:
            reference.dcp_step(hand, prototypes, base, x, y, F.cross_entropy, mse, **settings, numbers=numbers)
    assert_same(model, hand, rtol=1e-10, atol=1e-10)
    if variant == "dcl":
        assert_same(optimizer.companion, companion, rtol=1e-10, atol=1e-10)
    else:
        for k, prototype in prototypes.items():
            assert_same(optimizer.prototypes[k], prototype, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("criterion", "names_inputs"), [(nn.CrossEntropyLoss(), True), (Squares(), False)])
def test_parts_of_a_loss_together_carry_the_whole_penalty(criterion, names_inputs):
    found = []
    for parts in ((1.0,), (0.5, 0.5), (0.25, 0.6, 0.15)):
        scales = iter(parts)
        given = {"loss_scale": lambda: next(scales)} if isinstance(criterion, Squares) else {}  # noqa: B023
        model, optimizer = model_and_other_companion(**given)
        x, y = one()
        inputs = {"inputs": [*model.parameters()]} if names_inputs else {}
        z = model(x)
        for part in parts:
            (part * criterion(z, y)).backward(retain_graph=True, **inputs)
        assert optimizer.logs()["loss_scale"] == pytest.approx(parts[-1])
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        found.append((gradients, model.state_dict(), optimizer.companion.state_dict()))
    assert_same(found[1], found[0], **CLOSE)
    assert_same(found[2], found[0], **CLOSE)


@pytest.mark.parametrize(
    ("labels", "distance"),
    [("set_targets", "infonce"), ("soft", "kl"), ("soft", "mse"), ("ignored", "l1"), ("ignored", "kl")],
)
def test_prototypes_too_carry_the_whole_penalty_in_parts(labels, distance):
    """The second backward sees the logits, and the labels, as the first one did."""
    found = []
    for parts in ((1.0,), (0.5, 0.5)):
        model = mlp()
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=2.0, distance=distance)
        for x, y in batches(4):
            y = y.where(y != 0, -100) if labels == "ignored" else y
            optimizer.zero_grad()
            if labels == "soft":
                optimizer.set_targets(0.9 * F.one_hot(y, CLASSES) + 0.1 / CLASSES)
            elif labels == "set_targets":
                optimizer.set_targets(y)
            z = model(x)
            for part in parts:
                (part * F.cross_entropy(z, y)).backward(retain_graph=True)
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((model.state_dict(), optimizer.prototypes, optimizer.penalty))
    assert_same(*found, **CLOSE)


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
    assert_same(*found, **CLOSE)


def gradients_of_two_terms(together: bool, **options: Any) -> list[Tensor]:
    model, _ = model_and_other_companion(**options)
    x, y = one()
    z = model(x)
    terms = Squares()(z, y), z.square().mean()
    for loss in [sum(terms)] if together else terms:
        loss.backward(retain_graph=True)
    return [parameter.grad for parameter in model.parameters()]


def test_two_losses_whose_factor_cannot_be_read_carry_the_penalty_twice_unless_it_is_given():
    """Each is taken for a whole loss, and a warning says so; a callable can give the factor of each."""
    with pytest.warns(UserWarning, match=r"(?s)cannot be read from this loss's gradient.*pass .*loss_scale="):
        twice = gradients_of_two_terms(together=False)
    assert_same(twice, gradients_of_two_terms(together=True, loss_scale=2.0), rtol=1e-10, atol=1e-12)
    expected = gradients_of_two_terms(together=True)
    assert_same(gradients_of_two_terms(together=False, loss_scale=0.5), expected, rtol=1e-10, atol=1e-12)
    factors = iter([0.9, 0.1])
    found = gradients_of_two_terms(together=False, loss_scale=lambda: next(factors))
    assert_same(found, expected, rtol=1e-10, atol=1e-12)


def test_losses_of_parts_of_the_rows_add_up():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    z = model(x)
    (0.5 * F.cross_entropy(z[:8], y[:8]) + 0.5 * F.cross_entropy(z[8:], y[8:])).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)


# ---- logits that were converted --------------------------------------------------------------------------------------


class Converting(nn.Module):
    """Returns logits of another dtype than its body computes, and the loss that it took before, where it gets labels.

    So do models under accelerate's mixed precision: bfloat16 inside, ``.float()`` at the end.
    """

    def __init__(self, inside: torch.dtype, outside: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.body, self._outside = mlp(seed, dtype=inside), outside

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        found = {"logits": logits.to(self._outside)}
        return found if labels is None else found | {"loss": F.cross_entropy(logits, labels)}


def loss_of_converted(model: Converting, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)["logits"], y)


def loss_of_both(model: Converting, x: Tensor, y: Tensor) -> Tensor:
    """Half of it the model's own, half the script's on what the model returned: together the whole cross-entropy."""
    output = model(x, labels=y)
    return (output["loss"] + F.cross_entropy(output["logits"], y)) / 2


def loss_of_the_model(model: Converting, x: Tensor, y: Tensor) -> Tensor:
    return model(x, labels=y)["loss"]


CONVERSIONS = {
    "float32 to float64": (torch.float32, torch.float64, 1e-5),
    "bfloat16 to float32": (torch.bfloat16, torch.float32, 3e-2),
}


@pytest.mark.parametrize("loss_of", [loss_of_converted, loss_of_the_model, loss_of_both])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_query_and_the_backward_after_it_each_have_the_penalty_once(variant, conversion, loss_of):
    inside, outside, tolerance = CONVERSIONS[conversion]
    model = Converting(inside, outside)
    parameters, (first, second) = [*model.parameters()], batches(2, dtype=inside)
    if variant == "dcl":
        companion = Converting(inside, outside, seed=3)
        optimizer = DCLOptimizer(sgd(model), model, companion=companion, weight=2.0, alpha=0.6, loss_scale=1.0)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=2.0, alpha=0.6, loss_scale=1.0)
        optimizer.set_targets(first[1])
        loss_of(model, *first).backward()  # the prototypes are this batch's class means then
        optimizer.step()
        optimizer.zero_grad()
    x, y = second
    with torch.no_grad():
        c = companion(x)["logits"] if variant == "dcl" else optimizer.prototypes[y].to(outside)
    alone = copy.deepcopy(model.body)
    z = alone(x)
    (F.cross_entropy(z, y) + 2.0 * F.mse_loss(z.to(outside), c)).backward()

    if variant == "dcp":
        optimizer.set_targets(y)
    loss = loss_of(model, x, y)
    asked = torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    for expected, query, parameter in zip(alone.parameters(), asked, parameters, strict=True):
        scale = float(expected.grad.abs().max())
        torch.testing.assert_close(query, expected.grad, rtol=0.0, atol=tolerance * scale)
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0.0, atol=tolerance * scale)


# ---- warnings --------------------------------------------------------------------------------------------------------

# The classes' dimension matters to these; to mse's mean over all entries it does not.
BY_CLASS = {
    "kl": {"distance": "kl"},
    "infonce": {"distance": "infonce"},
    "callable": {"distance": lambda z, c: (z - c).square().mean()},
}


def warnings_of_two_steps(**options: Any) -> list[list[str]]:
    """What each of two steps of a model with logits of shape (4, 7, CLASSES) warns of."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double()
    optimizer = DCLOptimizer(sgd(model), model, loss_scale=1.0, weight=2.0, alpha=0.6, **options)
    found = []
    for _ in range(2):
        x = torch.randn(4, 7, FEATURES, dtype=torch.float64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            model(x).square().mean().backward()  # a cross-entropy would show the dimension
            optimizer.step()
        assert all(warning.filename == __file__ for warning in caught)
        found.append([str(warning.message) for warning in caught])
    return found


@pytest.mark.parametrize("options", BY_CLASS.values(), ids=BY_CLASS)
def test_three_dimensional_logits_without_class_dim_are_warned_of_once(options):
    first, second = warnings_of_two_steps(**options)
    assert len(first) == 1
    assert "class_dim" in first[0]
    assert "(4, 7, 5)" in first[0]
    assert second == []
    for class_dim in (1, -1):
        assert warnings_of_two_steps(class_dim=class_dim, **options) == [[], []]
    assert warnings_of_two_steps() == [[], []]


def test_the_warning_of_an_unreadable_loss_scale_points_at_the_backward():
    """And comes with the second batch of a step, where a wrong factor would matter."""
    model = mlp()
    optimizer = wrap(model)
    first, second = (Squares()(model(x), y) for x, y in batches(2))
    first.backward()
    with pytest.warns(UserWarning, match="loss scale .* cannot be read") as caught:
        second.backward()
    lines = [linecache.getline(warning.filename, warning.lineno).strip() for warning in caught]
    assert lines == ["second.backward()"]
    optimizer.step()


# ---- memory ----------------------------------------------------------------------------------------------------------

COPIES = ("clone", "copy_", "_to_copy", "_reshape_copy", "cat")  # what copies come to below autograd, contiguous' too


class CopiesOf(TorchDispatchMode):
    """Finds the copies that give a tensor of so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements, self.found = elements, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.found += [name for size in sizes if name in COPIES and size == self._elements]
        return result


@pytest.mark.parametrize("kind", ["dcl", "dcp"])
def test_dense_logits_are_copied_once_a_forward_of_each_network(kind):
    torch.manual_seed(0)
    model = nn.Conv2d(3, CLASSES, 1).double()
    if kind == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, weight=2.0, alpha=0.6)
    else:
        labels = torch.zeros(2, 6, 7, dtype=torch.int64)
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, targets=lambda args, kwargs: labels)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    y = torch.randint(CLASSES, (2, 6, 7))
    for _ in range(3):
        with CopiesOf(2 * CLASSES * 6 * 7) as copies:
            z = model(x)
        assert z.numel() == 2 * CLASSES * 6 * 7
        with CopiesOf(z.numel()) as network:
            nn.Conv2d.forward(model, x)
        optimizer.zero_grad()
        F.cross_entropy(z, y).backward()
        optimizer.step()
    assert network.found == []
    assert len(copies.found) <= (2 if kind == "dcl" else 1), copies.found
