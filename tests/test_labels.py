"""Where labels come from: those given ahead are the next forward's, whatever its mode, and no later one's."""

from __future__ import annotations

import copy
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from tests.helpers import CLASSES, TwoHeads, assert_same, batches, mlp, one, sgd


def wrap(model: nn.Module, **options) -> DCPOptimizer:
    return DCPOptimizer(sgd(model), model, CLASSES, **options)


def evaluated(model, x):
    model.eval()
    model(x)
    model.train()


def without_gradients(model, x):
    with torch.no_grad():
        model(x)


def while_frozen(model, x):
    model.requires_grad_(False)
    model(x)
    model.requires_grad_(True)


def by_torch_func(model, x):
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(parameters)


FORWARDS_LEFT_ALONE = [evaluated, without_gradients, while_frozen, by_torch_func]


@pytest.mark.parametrize("left_alone", FORWARDS_LEFT_ALONE)
def test_labels_given_before_a_forward_that_is_left_alone_end_with_it(left_alone):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = wrap(model)
    x, y = one()
    optimizer.set_targets(torch.zeros(3, dtype=torch.long))
    left_alone(model, x[:3])
    criterion(model(x), y).backward()
    optimizer.step()
    assert optimizer.forecaster.seen.tolist() == [bool((y == k).any()) for k in range(CLASSES)]


@pytest.mark.parametrize("left_alone", FORWARDS_LEFT_ALONE)
def test_the_batch_that_they_were_meant_for_then_has_none_and_says_so(left_alone):
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    optimizer.set_targets(y)
    left_alone(model, x)
    loss = F.mse_loss(model(x), F.one_hot(y, CLASSES).to(x))
    with pytest.raises(
        RuntimeError, match=r"(?s)labels of this batch cannot be read.*set_targets\(labels\) before the forward"
    ):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("left_alone", FORWARDS_LEFT_ALONE)
def test_a_closure_that_sets_labels_after_stale_ones_takes_its_own(left_alone):
    models = [mlp(), mlp()]
    for stale, model in enumerate(models):
        optimizer = wrap(model)
        for x, y in batches(3):
            if stale:
                optimizer.set_targets(torch.zeros(16, dtype=torch.long))
                left_alone(model, x)
                optimizer.zero_grad()

            def closure():
                optimizer.set_targets(y)  # noqa: B023
                return F.cross_entropy(model(x), y)  # noqa: B023

            optimizer.step(closure)
    assert_same(*models)


def test_labels_of_two_heads_that_are_processed_first_are_those_given():
    model, criterion = TwoHeads(), nn.CrossEntropyLoss()
    optimizer = wrap(model, logits=itemgetter(0))
    x, y = one()
    optimizer.set_targets(y)
    main, side = model(x)
    (criterion(2.0 * main, y) + 0.4 * criterion(side, y.flip(0))).backward()
    optimizer.step()
    assert optimizer.logs()["loss_scale"] == 1.0
    assert_same(optimizer.prototypes[0], main.detach()[y == 0].mean(0), atol=1e-12)


def test_loading_a_state_drops_labels_given_before():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = wrap(model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.set_targets(torch.zeros(16, dtype=torch.long))
    optimizer.load_state_dict(state)
    x, y = one()
    criterion(model(x), y).backward()
    optimizer.step()
    assert optimizer.forecaster.seen.sum() > 1


LOSSES_OF_TWO = {
    "put together": lambda first, second, labels: F.cross_entropy(torch.cat([first, second]), torch.cat(labels)),
    "mean": lambda first, second, labels: F.cross_entropy((first + second) / 2, labels[0]),
    "one held to the other": lambda first, second, labels: F.mse_loss(first, second),
    "converted": lambda first, second, labels: sum(map(F.cross_entropy, (first.float(), second.float()), labels)),
}


@pytest.mark.parametrize("loss", LOSSES_OF_TWO)
def test_labels_given_before_each_of_two_forwards_are_its_own(loss):
    model = mlp()
    optimizer = wrap(model, loss_scale=1.0)
    data, outputs = list(batches(2)), []
    for x, y in data:
        optimizer.set_targets(y)
        outputs.append(model(x))
    labels = [y for _, y in data]
    LOSSES_OF_TWO[loss](*outputs, labels).backward()
    optimizer.step()
    z, y = torch.cat(outputs).detach(), torch.cat(labels)
    for k in y.unique():
        assert_same(optimizer.prototypes[k], z[y == k].mean(0), atol=1e-12)


def test_a_checkpoint_that_recomputes_the_model_leaves_the_next_batchs_labels_alone():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    optimizer.set_targets(y)
    z = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    optimizer.set_targets(y.flip(0))
    F.cross_entropy(z, y).backward()
    F.cross_entropy(model(x), y).backward()
    both = [model(x).detach()[labels == 0].sum(0) for labels in (y, y.flip(0))]
    optimizer.step()
    expected = sum(both) / (2 * (y == 0).sum())
    assert_same(optimizer.prototypes[0], expected, rtol=1e-9, atol=1e-12)


def test_a_forward_that_raises_ends_them_too():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = wrap(model)
    x, y = one()
    optimizer.set_targets(torch.zeros(16, dtype=torch.long))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(x[:, 1:])
    criterion(model(x), y).backward()
    optimizer.step()
    assert optimizer.forecaster.seen.sum() > 1


def test_a_model_inside_a_reentrant_checkpoint_gets_those_of_its_first_forward():
    """That one runs without gradients and is left alone; the recomputation is the forward that is trained."""
    models = [mlp(), mlp()]
    for inside, model in enumerate(models):
        optimizer = wrap(model)
        for x, y in batches(3):
            x.requires_grad_()
            optimizer.zero_grad()
            optimizer.set_targets(y)
            z = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True) if inside else model(x)
            F.cross_entropy(z, y).backward()
            optimizer.step()
    assert_same(*models)
