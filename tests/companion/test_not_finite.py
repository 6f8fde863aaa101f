"""A companion whose weights are not finite is copied anew from the model; the script's own one is not."""

import copy
import warnings

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer
from dcl_optim.pytorch.synchronization import SYNC_INTERVAL
from tests.helpers import assert_same, backward, batches, fit, mlp, needs_gloo, same_on_both, train

NAN, INF = float("nan"), float("inf")
COPIED = "weights are not finite.*it is copied from the model again"


def wrap(model, base=torch.optim.AdamW, **options):
    return DCLOptimizer(
        base(model.parameters(), lr=1e-2), model, **{"weight": 0.7, "alpha": 0.4} | options, companion_fraction=1
    )


def is_finite(model):
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def spoil_a_weight(optimizer):
    optimizer.companion[0].weight.data[0, 0] = NAN


def overflow(optimizer):
    optimizer.companion[2].bias.data.fill_(INF)


def load_nan(optimizer):
    state = optimizer.state_dict()
    state["dcl_optim.DCLOptimizer"]["forecaster"]["model"]["0.weight"][0] = NAN
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("base", "lose"),
    [(torch.optim.AdamW, spoil_a_weight), (torch.optim.Adagrad, overflow), (torch.optim.SGD, load_nan)],
)
def test_a_companion_that_is_not_finite_is_copied_again_in_the_next_step_that_asks(base, lose):
    """In steps 1, 2, 4, 8, ... and 100, 200, ...; the model is trained on all the while."""
    model = mlp()
    optimizer = wrap(model, base)
    data = list(batches(10))
    fit(optimizer, data[:5])
    lose(optimizer)
    fit(optimizer, data[5:7])
    assert not is_finite(optimizer.companion)
    assert is_finite(model)
    with pytest.warns(UserWarning, match=COPIED):
        fit(optimizer, data[7:8])
    assert_same(optimizer.companion, model)
    fit(optimizer, data[8:])
    assert is_finite(optimizer.companion)
    assert 0 < optimizer.logs()["penalty"] < INF


@pytest.mark.parametrize("distance", ["mse", "kl", "infonce"])
def test_steps_until_then_are_without_its_penalty(distance):
    """The model is trained as by its base alone."""
    model, plain = mlp(), mlp()
    optimizer = wrap(model, distance=distance)
    *data, third, fourth = batches(4)
    fit(optimizer, data)
    theirs = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    optimizer.companion[2].bias.data.fill_(NAN)  # no entry of its logits is finite
    fit(optimizer, [third])
    with pytest.warns(UserWarning, match=COPIED):
        fit(optimizer, [fourth])
    train(plain, theirs, [third, fourth])
    assert_same(model, plain)


def test_a_companion_of_the_scripts_own_is_left_to_the_script():
    model, companion = mlp(), mlp(seed=1)
    optimizer = wrap(model, companion=companion)
    spoil_a_weight(optimizer)
    with pytest.warns(UserWarning, match="load weights into it"):
        fit(optimizer, batches(1))
    assert optimizer.companion is companion
    assert is_finite(model)


@pytest.mark.gpu
def test_on_a_gpu_it_is_found_once_in_a_hundred_steps():
    model = mlp(dtype=torch.float32).cuda()
    optimizer = wrap(model)
    data = [(x.cuda(), y.cuda()) for x, y in batches(SYNC_INTERVAL + 1, dtype=torch.float32)]
    fit(optimizer, data[:65])
    spoil_a_weight(optimizer)
    fit(optimizer, data[65 : SYNC_INTERVAL - 1])
    assert is_finite(model)
    with pytest.warns(UserWarning, match=COPIED):
        fit(optimizer, data[SYNC_INTERVAL - 1 :])
    assert is_finite(optimizer.companion)


# ---- ranks -----------------------------------------------------------------------------------------------------------


STEPS = (4, 5)  # in which the first rank's batch is not finite; steps 1, 2 and 4 read values


def worker(rank, folder):
    for step in STEPS:
        torch.save(one_rank_meets_it(rank, step), folder / f"{step} {rank}.pt")


def one_rank_meets_it(rank, step):
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = wrap(model)
    data = list(batches(10))
    fit(optimizer, data[rank : rank + step - 1])
    before = copy.deepcopy(optimizer.companion)
    x, y = data[8]
    if rank == 0:
        x[1, 2] = NAN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.zero_grad()
        backward(model, x, y)
        for parameter in model.parameters():
            parameter.grad.zero_()  # as a script that cleans its gradients and steps all the same
        optimizer.step()
    assert not torch.equal(optimizer.companion[0].weight, before[0].weight)  # the other rank's batch was learned from
    fit(optimizer, data[rank : rank + 2])
    assert is_finite(model)
    assert is_finite(optimizer.companion)
    return [parameter.detach() for parameter in optimizer.companion.parameters()]


@needs_gloo
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_whose_batch_is_not_finite_leaves_the_others_in_step(step, ranks):
    same_on_both(ranks, step)
