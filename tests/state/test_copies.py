"""Copies and pickles go on by themselves; hooks come off without a trace."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests import reference
from tests.helpers import (
    assert_same,
    assert_same_networks,
    backward,
    batch_norm_net,
    batches,
    fit,
    mlp,
    one,
    sgd,
    through_pickle,
    train,
    wrap,
)
from tests.reference import EACH


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_with_the_model_goes_on_independently(copied):
    model = batch_norm_net()
    optimizer = wrap(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # leaves a patched step on the instance
    fit(optimizer, batches(3))
    twin, twin_optimizer = copied((model, optimizer))
    fit(optimizer, batches(3, seed=2))
    train(twin, twin_optimizer, batches(3, seed=2))
    assert_same_networks(optimizer, twin_optimizer)
    assert twin_optimizer.model is twin
    assert sum(type(hook).__name__ == "Hook" for hook in twin._forward_hooks.values()) == 1


@pytest.mark.guard
def test_a_copy_of_a_model_that_holds_its_optimizer():
    """It is not half built when our hooks come; its own optimizer, copied with it, says that it regularizes nothing."""
    model = mlp()
    model.trainer = wrap(model)
    train(model, model.trainer, batches(2))
    twin = copy.deepcopy(model)
    assert_same(dict(twin.named_parameters()), dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match="no backward through a training forward"):
        train(twin, twin.trainer, batches(1))
    train(twin, wrap(twin), batches(2, seed=2))
    train(model, model.trainer, batches(1))


@EACH
def test_a_copy_keeps_nothing_of_its_original(variant):
    model = mlp()
    optimizer = reference.wrap(variant, model)
    fit(optimizer, batches(2))
    copied = copy.deepcopy((model, optimizer))
    originals = [weakref.ref(one) for one in (model, optimizer, optimizer.forecaster)]
    del model, optimizer
    gc.collect()
    assert [original() for original in originals] == [None] * 3
    train(*copied, batches(2))


@EACH
def test_a_model_that_is_saved_whole_after_detach_loads_without_this_package(variant):
    model = mlp()
    optimizer = reference.wrap(variant, model)
    fit(optimizer, batches(2))
    for needs_package in (True, False):
        file = io.BytesIO()
        torch.save(model, file)
        assert (b"dcl_optim" in file.getvalue()) == needs_package
        optimizer.detach()


def test_a_copy_of_a_detached_optimizer_stays_detached():
    optimizer = wrap(mlp())
    optimizer.detach()
    twin = copy.deepcopy(optimizer)
    assert not twin.model._forward_hooks
    fit(twin, batches(2))
    twin.detach()


def test_a_dead_optimizer_leaves_no_hook():
    model = mlp()
    optimizer = wrap(model)
    fit(optimizer, batches(1))
    del optimizer
    assert not model._forward_hooks, "no reference cycle keeps the optimizer alive"
    wrap(model)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.guard
def test_a_second_wrapper_takes_over_and_the_first_says_so(parallel):
    """As when a notebook's cell runs again, or a trainer fits again, while the first optimizer still exists."""
    model = mlp()
    optimizer = wrap(model)
    fit(optimizer, batches(2))
    second = wrap(nn.DataParallel(model) if parallel else model)
    before = copy.deepcopy(model)
    backward(model, *one())
    with pytest.raises(RuntimeError, match=r"another optimizer has wrapped the model since.*call detach\(\)"):
        optimizer.step()
    assert_same(model, before)
    optimizer.detach()
    optimizer.step()  # goes on as its base
    assert not torch.equal(model[0].weight, before[0].weight)
    fit(second, batches(2, seed=5))
    assert second.logs()["step"] == 2


def test_a_shallow_copy_is_the_same_optimizer_under_a_second_name():
    model, expected = mlp(), mlp()
    optimizer = wrap(model)
    same = copy.copy(optimizer)
    for index, batch in enumerate(batches(4)):
        train(model, (optimizer, same)[index % 2], [batch])
    train(expected, wrap(expected), batches(4))
    assert_same(model, expected)
    assert same.logs()["step"] == optimizer.logs()["step"] == 4


# ---- averages of the weights ----------------------------------------------------------------------------------------


def averaged_run(variant, wrapped_first, averaging=True, **options):
    """Ten steps, and an exponential average of the weights whose batch norm is recalibrated twice."""
    model, criterion = batch_norm_net(), nn.CrossEntropyLoss()
    optimizer = sgd(model, lr=0.05)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    if variant != "plain":
        optimizer = reference.wrap(variant, model, optimizer, **options)
    if wrapped_first:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step, batch in enumerate(batches(10)):
        train(model, optimizer, [batch], criterion)
        if averaging:
            ema.update_parameters(model)
            if step in (4, 9):
                update_bn(batches(3, seed=7), ema)
                update_bn(batches(3, seed=7), copy.deepcopy(model))
    return model, optimizer, ema


@pytest.mark.parametrize(("variant", "wrapped_first"), [("dcl", True), ("dcp", False)])
def test_averages_are_those_of_the_plain_run_and_disturb_nothing(variant, wrapped_first):
    plain = averaged_run("plain", wrapped_first)
    unweighted = averaged_run(variant, wrapped_first, weight=0.0)
    assert_same(unweighted[0], plain[0])
    assert_same(unweighted[2], plain[2])

    averaged, alone = (averaged_run(variant, wrapped_first, averaging) for averaging in (True, False))
    assert_same(averaged[0], alone[0])
    assert_same(averaged[1].state_dict(), alone[1].state_dict())
    assert not torch.equal(averaged[2].module[0].weight, averaged[0][0].weight)
