"""What a script does to the model's structure after wrapping, and parameters that another optimizer trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batch_norm_net, batches, mlp, one, sgd, train, wrap


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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_that_another_optimizer_trains_are_the_models(parts: int, overlap: bool) -> None:
    model, hand = mlp(), mlp()
    companion = copy.deepcopy(hand)
    optimizers = two_optimizers(model, overlap=overlap, loss_scale=1 / parts)
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


def test_a_companion_of_its_own_dtype_follows_in_that_dtype_and_leaves_the_frozen_alone() -> None:
    model = nn.Sequential(mlp()[:2], nn.Linear(12, 12), nn.Linear(12, CLASSES)).double()
    model[0].requires_grad_(False)
    optimizers = two_optimizers(model, companion_dtype=torch.float32)
    train_with_both(model, optimizers, batches(3))
    optimizers[1].step = lambda: None  # the last step's values are those of the next forward
    frozen = optimizers[0].companion[0][0].weight
    version = frozen.data_ptr(), frozen._version
    train_with_both(model, optimizers, batches(1))
    assert_same(optimizers[0].companion[1].weight, model[1].weight.float())
    assert optimizers[0].companion[0][0].weight.dtype == torch.float32
    assert (frozen.data_ptr(), frozen._version) == version


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


# ---- layers replaced after wrapping ---------------------------------------------------------------------------------


def new_head(model: nn.Module, optimizer: DCLOptimizer) -> None:
    torch.manual_seed(5)
    model[2] = nn.Linear(12, CLASSES).double()
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})


def deeper_head(model: nn.Module, optimizer: DCLOptimizer) -> None:
    torch.manual_seed(5)
    model[2] = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, CLASSES)).double()
    optimizer.add_param_group({"params": model[2].parameters()})


def taken_out(model: nn.Module, optimizer: DCLOptimizer) -> None:
    model[1] = nn.Identity()
    new_head(model, optimizer)


def removed(model: nn.Module, optimizer: DCLOptimizer) -> None:
    del model[1]  # what was the third is the second
    model.append(nn.Linear(CLASSES, CLASSES).double())
    optimizer.add_param_group({"params": model[-1].parameters()})


@pytest.mark.parametrize("change", [new_head, deeper_head, taken_out, removed])
@pytest.mark.parametrize("options", [{}, {"companion_dtype": torch.float32}])
def test_the_companion_gets_layers_that_took_the_place_of_others(
    change: Callable[[nn.Module, DCLOptimizer], None], options: dict[str, Any]
) -> None:
    model = mlp()
    optimizer = wrap(model, **options)
    train(model, optimizer, batches(2))
    kept = optimizer.companion[0].weight
    change(model, optimizer)
    assert [*map(type, optimizer.companion)] == [*map(type, model)]
    assert optimizer.companion[0].weight is kept
    assert_same(optimizer.companion[-1].state_dict(), copy.deepcopy(model[-1]).to(kept.dtype).state_dict())
    train(model, optimizer, batches(3))
    assert_same(
        [parameter.shape for parameter in optimizer.companion.parameters()], [p.shape for p in model.parameters()]
    )
    last, theirs = list(optimizer.companion.parameters())[-1], list(model.parameters())[-1]
    assert not torch.equal(last.double(), theirs)


def test_a_layer_that_the_model_sets_to_none_is_none_in_the_companion() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra, self.net = nn.Linear(FEATURES, FEATURES).double(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x if self.extra is None else self.extra(x))

    model = Auxiliary()
    optimizer = wrap(model)
    train(model, optimizer, batches(1))
    model.extra = None
    model.more = nn.Linear(1, 1).double()
    optimizer.add_param_group({"params": model.more.parameters()})
    assert optimizer.companion.extra is None
    train(model, optimizer, batches(2))
    model.extra = nn.Linear(FEATURES, FEATURES).double()
    optimizer.add_param_group({"params": model.extra.parameters()})
    assert_same(optimizer.companion.extra, model.extra)
    train(model, optimizer, batches(2))


def test_replaced_parameters_are_named() -> None:
    model = batch_norm_net()
    optimizer = wrap(model)
    train(model, optimizer, batches(1))
    model[0].bias = None
    extra = nn.Parameter(torch.zeros(()))
    with pytest.raises(RuntimeError, match=r"parameters \['0.bias'\] were replaced.*wrap the model again"):
        optimizer.add_param_group({"params": [extra]})


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
