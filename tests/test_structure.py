"""What a script does to the model's structure after wrapping, and parameters that another optimizer trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp, one, sgd, train, wrap


def two_optimizers(model: nn.Module, **options: Any) -> tuple[DCLOptimizer, torch.optim.Optimizer]:
    """The head's is wrapped, the body's is not."""
    head = DCLOptimizer(torch.optim.SGD(model[-1].parameters(), lr=0.1), model, **{"weight": 1.0} | options)
    return head, torch.optim.SGD(model[:-1].parameters(), lr=0.2, momentum=0.9)


def train_with_both(model: nn.Module, optimizers: Any, data: Any, parts: int = 1) -> None:
    for x, y in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(rows) for rows in x.chunk(parts)]  # all forwards before the one backward
        losses = [F.cross_entropy(z, labels) for z, labels in zip(outputs, y.chunk(parts), strict=True)]
        (sum(losses) / parts).backward()
        for optimizer in optimizers:
            optimizer.step()


def by_hand(model: nn.Module, companion: nn.Module, data: Any, parts: int) -> None:
    head, body = torch.optim.SGD(model[-1].parameters(), lr=0.1), torch.optim.SGD(
        model[:-1].parameters(), lr=0.2, momentum=0.9
    )  # fmt: skip
    chasing = torch.optim.SGD(companion[-1].parameters(), lr=0.1)
    for x, y in data:
        companion[:-1].load_state_dict(model[:-1].state_dict())
        for optimizer in (head, body, chasing):
            optimizer.zero_grad()
        for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            z, c = model(rows), companion(rows)
            ((F.cross_entropy(z, labels) + F.mse_loss(z, c.detach())) / parts).backward()
            (F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()) / parts).backward()
        for optimizer in (head, body, chasing):
            optimizer.step()


@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_that_another_optimizer_trains_are_the_models(parts: int) -> None:
    model, hand = mlp(), mlp()
    companion = copy.deepcopy(hand)
    optimizers = two_optimizers(model, loss_scale=1 / parts)
    ours: list[Tensor] = []
    optimizers[0].companion[0].register_forward_pre_hook(lambda module, args: ours.append(module.weight.clone()))
    theirs: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: theirs.append(module.weight.clone()))
    train_with_both(model, optimizers, batches(10), parts)
    by_hand(hand, companion, batches(10), parts)
    assert_same(model, hand, rtol=1e-9, atol=1e-11)
    assert_same(optimizers[0].companion[-1], companion[-1], rtol=1e-9, atol=1e-11)
    assert len(ours) == 10 * parts
    assert_same(ours, theirs)
    assert not torch.equal(ours[-1], mlp()[0].weight)


def test_gradients_of_parameters_that_another_optimizer_trains_do_not_pile_up() -> None:
    model = mlp()
    optimizers = two_optimizers(model)
    sizes = []
    optimizers[0].companion[0].register_forward_hook(lambda module, *_: sizes.append(module.weight.grad))
    train_with_both(model, optimizers, batches(3))
    assert sizes == [None] * 3


def test_what_is_frozen_after_its_last_step_has_its_last_value() -> None:
    model = mlp()
    optimizers = two_optimizers(model)
    train_with_both(model, optimizers, batches(2))
    model[:-1].requires_grad_(False)
    train_with_both(model, optimizers, batches(1))
    assert_same(optimizers[0].companion[0], model[0])


def test_a_parameter_that_moves_into_the_wrapped_optimizer_is_chasing_from_then_on() -> None:
    model = mlp()
    wrapped, other = two_optimizers(model)
    train_with_both(model, (wrapped, other), batches(2))
    wrapped.add_param_group({"params": model[0].parameters(), "lr": 0.05})
    before = wrapped.companion[0].weight.clone()
    train(model, wrapped, batches(3))
    assert not torch.equal(wrapped.companion[0].weight, model[0].weight)
    assert not torch.equal(wrapped.companion[0].weight, before)
    assert len(wrapped.companion_optimizer.param_groups) == 2


def test_the_first_step_of_parameters_that_are_added_is_that_of_the_next_batch_alone() -> None:
    """Their gradients of a batch that was given up are gone, also those that the companion's optimizer did not know."""
    data, found = list(batches(4)), []
    for earlier in (data[:1], data[1:2]):
        model = mlp()
        optimizer, _ = two_optimizers(model)
        optimizer.companion.load_state_dict(mlp(seed=3).state_dict())
        for x, y in earlier:
            F.cross_entropy(model(x), y).backward()
        model.zero_grad()  # as where a gradient scaler skips the step
        model(data[2][0])
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        optimizer.companion[0].load_state_dict(mlp(seed=3)[0].state_dict())
        train(model, optimizer, data[2:])
        found.append(optimizer.companion.state_dict())
    assert_same(*found)


# ---- layers added or replaced after wrapping ------------------------------------------------------------------------


def linear(inputs: int) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(inputs, CLASSES).double()


def new_head(model: Any) -> list[str]:
    model[2] = linear(12)
    return ["2.bias", "2.weight"]


def one_layer_more(model: Any) -> list[str]:
    model.append(linear(CLASSES))
    return ["3.bias", "3.weight"]


def new_weight(model: Any) -> list[str]:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return ["0.weight"]


CHANGES = [new_head, one_layer_more, new_weight]
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "a list": lambda model: list(model.parameters()),
    "a generator": lambda model: model.parameters(),
    "a tensor": lambda model: next(model.parameters()),
}


def everything(optimizer: DCLOptimizer) -> Any:
    both = (optimizer.base, optimizer.companion_optimizer)
    groups = [[[id(p) for p in group["params"]] for group in one.param_groups] for one in both]
    return groups, repr(optimizer.companion), copy.deepcopy(optimizer.state_dict())


def changed(change: Callable[[Any], list[str]]) -> tuple[Any, DCLOptimizer, list[str]]:
    """A model that was changed after its first steps, its optimizer and the names of the new parameters."""
    model = mlp()
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    train(model, optimizer, batches(2))
    return model, optimizer, change(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", CHANGES)
def test_new_layers_are_refused_by_name_and_nothing_changes(change: Any, form: str) -> None:
    model, optimizer, names = changed(change)
    before = everything(optimizer)
    layer = model[int(names[0][0])]
    with pytest.raises(RuntimeError, match=r"since it was wrapped.*wrap the model again") as caught:
        optimizer.add_param_group({"params": FORMS[form](layer), "lr": 0.2})
    assert repr(names[-1]) in str(caught.value)
    assert_same(everything(optimizer), before)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_that_is_wrapped_again_has_a_companion_like_it(change: Any) -> None:
    model, optimizer, names = changed(change)
    optimizer.base.add_param_group({"params": [model.get_parameter(name) for name in names], "lr": 0.2})
    data = list(batches(3))
    again = DCLOptimizer(optimizer.base, model, weight=1.0)
    train(model, again, data[:1])
    assert again.penalty == 0
    train(model, again, data[1:])
    assert again.penalty > 0
    assert [p.shape for p in again.companion.parameters()] == [p.shape for p in model.parameters()]


def test_unfreezing_in_a_changed_model_is_refused() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, batches(1))
    names = new_head(model)
    train(model, optimizer, batches(1))  # as it is: nothing of the companion's has to follow
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=rf"{names[-1]}.*wrap the model again"):
        model(one()[0])


def test_parameters_that_are_not_the_models_are_the_bases_alone() -> None:
    model, temperature = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = wrap(model)
    train(model, optimizer, batches(1))
    optimizer.add_param_group({"params": [temperature], "lr": 0.01})
    train(model, optimizer, batches(2), lambda z, y: F.cross_entropy(z / temperature, y))
    assert temperature != 1
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 1]
    slots = [[slot.requires_grad for slot in group["params"]] for group in optimizer.companion_optimizer.param_groups]
    assert slots == [[True] * 4, [False]]


def test_nothing_is_added_to_the_optimizer_of_a_changed_model() -> None:
    """Also what is not the model's: the companion does not have the new head."""
    _, optimizer, names = changed(new_head)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=rf"{names[-1]}.*wrap the model again"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))], "lr": 0.01})
    assert_same(everything(optimizer), before)


def test_new_layers_are_trained_where_the_companion_is_no_copy() -> None:
    model = mlp()
    optimizer = wrap(model, companion=lambda: mlp(seed=1))
    train(model, optimizer, batches(1))
    one_layer_more(model)
    before = model[3].weight.detach().clone()
    optimizer.add_param_group({"params": model[3].parameters()})
    train(model, optimizer, batches(2))
    assert not torch.equal(model[3].weight, before)
    assert len(optimizer.companion) == 3


def test_prototypes_know_no_layers() -> None:
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = DCPOptimizer(sgd(model), model, CLASSES)
    train(model, optimizer, batches(1), criterion)
    new_head(model)
    before = model[2].weight.detach().clone()
    optimizer.add_param_group({"params": model[2].parameters()})
    train(model, optimizer, batches(2), criterion)
    assert not torch.equal(model[2].weight, before)


def test_an_optimizer_that_the_model_holds_is_not_copied() -> None:
    model = mlp()
    model.optimizer = sgd(model)
    train(model, model.optimizer, batches(1))
    optimizer = DCLOptimizer(model.optimizer, model)
    assert optimizer.companion.optimizer is model.optimizer
    model.optimizer = optimizer
    again = DCLOptimizer(optimizer.base, model)
    assert again.companion.optimizer is optimizer
    model(one()[0])
