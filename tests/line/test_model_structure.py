"""What a script does to the model's structure after wrapping, and parameters that another optimizer trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd, train, wrap

COPIED_AGAIN = "trains other parameters than before.*the companion is copied from the model again"


def two_optimizers(model: nn.Module) -> tuple[DCLOptimizer, torch.optim.Optimizer]:
    """The head's is wrapped, the body's is not."""
    base = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    head = DCLOptimizer(base, model, weight=1.0, alpha=0.6, distance="squared")
    return head, torch.optim.SGD(model[:-1].parameters(), lr=0.2, momentum=0.9)


def train_with_both(model: nn.Module, optimizers: Any, data: Any, parts: int) -> None:
    for x, y in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(rows) for rows in x.chunk(parts)]  # all forward passes before the one backward pass
        losses = [F.cross_entropy(z, labels) for z, labels in zip(outputs, y.chunk(parts), strict=True)]
        (sum(losses) / parts).backward()
        for optimizer in optimizers:
            optimizer.step()


def train_by_hand(model: nn.Module, companion: nn.Module, data: Any, parts: int) -> None:
    head = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    body = torch.optim.SGD(model[:-1].parameters(), lr=0.2, momentum=0.9)
    learning = torch.optim.SGD(companion[-1].parameters(), lr=0.1)
    for x, y in data:
        companion[:-1].load_state_dict(model[:-1].state_dict())
        for optimizer in (head, body, learning):
            optimizer.zero_grad()
        for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            z, c = model(rows), companion(rows)
            ((F.cross_entropy(z, labels) + F.mse_loss(z, c.detach())) / parts).backward()
            (F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()) / parts).backward()
        for optimizer in (head, body, learning):
            optimizer.step()


@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_that_another_optimizer_trains_are_the_models(parts: int) -> None:
    model, by_hand = mlp(), mlp()
    companion = copy.deepcopy(by_hand)
    optimizers = two_optimizers(model)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    optimizers[0].companion[0].register_forward_pre_hook(lambda module, args: ours.append(module.weight.clone()))
    model[0].register_forward_pre_hook(lambda module, args: theirs.append(module.weight.clone()))
    train_with_both(model, optimizers, batches(10), parts)
    train_by_hand(by_hand, companion, batches(10), parts)
    assert_same(model, by_hand, rtol=1e-9, atol=1e-11)
    assert_same(optimizers[0].companion[-1], companion[-1], rtol=1e-9, atol=1e-11)
    assert len(ours) == 10 * parts
    assert_same(ours, theirs)
    assert not torch.equal(ours[-1], mlp()[0].weight)


# ---- the base optimizer trains other parameters than before ----------------------------------------------------------


def linear(inputs: int) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(inputs, CLASSES).double()


def new_head(model: Any) -> Iterator[nn.Parameter]:
    model[2] = linear(12)
    return model[2].parameters()


def one_layer_more(model: Any) -> Iterator[nn.Parameter]:
    model.append(linear(CLASSES))
    return model[3].parameters()


def new_weight(model: Any) -> Iterator[nn.Parameter]:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return iter([model[0].weight])


def body_of_another_optimizer(model: Any) -> Iterator[nn.Parameter]:
    return model[0].parameters()


def none_of_the_models(model: Any) -> Iterator[nn.Parameter]:
    return iter([nn.Parameter(torch.ones((), dtype=torch.float64))])


CHANGES = [new_head, one_layer_more, new_weight, body_of_another_optimizer, none_of_the_models]


@pytest.mark.parametrize("change", CHANGES)
def test_the_companion_is_copied_again_where_a_group_is_added(change: Callable[[Any], Any]) -> None:
    model, data = mlp(), list(batches(4))
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    train(model, optimizer, data[:2])
    optimizer.add_param_group({"params": change(model), "lr": 0.05})
    with pytest.warns(UserWarning, match=COPIED_AGAIN):
        train(model, optimizer, data[2:3])
    assert optimizer.logs()["penalty"] == 0
    train(model, optimizer, data[3:])
    assert optimizer.logs()["penalty"] > 0
    assert [p.shape for p in optimizer.companion.parameters()] == [p.shape for p in model.parameters()]
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == [0.1, 0.05]


def test_the_companion_is_copied_again_where_other_parameters_replace_the_groups() -> None:
    """As in layer-wise training. The error about an engine's parameters is for those that the model does not have."""
    model, data = mlp(), list(batches(4))
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    train(model, optimizer, data[:2])
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.warns(UserWarning, match=COPIED_AGAIN):
        train(model, optimizer, data[2:3])
    before = model[0].weight.detach().clone()
    train(model, optimizer, data[3:])
    assert optimizer.logs()["penalty"] > 0
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("wrapper", ["DCL, given companion", "DCP"])
def test_new_layers_are_trained_where_nothing_is_copied(wrapper: str) -> None:
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model) if wrapper == "DCP" else wrap(model, companion=mlp(seed=1))
    train(model, optimizer, batches(1))
    optimizer.add_param_group({"params": one_layer_more(model)})
    before = model[3].weight.detach().clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(model[3].weight, before)
