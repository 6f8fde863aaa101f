"""A companion that is not finite is copied anew from the model, on all ranks at once; the script's own one is not."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from dcl_optim._sync import SYNC_INTERVAL
from tests.helpers import assert_same, batches, mlp, train
from tests.test_algorithm_not_finite import Script, nan_in_the_input

NAN, INF = float("nan"), float("inf")


def spoil_a_weight(script: Script) -> None:
    script.optimizer.companion[0].weight.data[0, 0] = NAN


def overflow(script: Script) -> None:
    script.optimizer.companion[2].bias.data.fill_(INF)


def load_nan(script: Script) -> None:
    state = script.optimizer.state_dict()
    state["dcl_optim.DCLOptimizer"]["forecaster"]["model"]["0.weight"][0] = NAN
    script.optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("base", "lose"),
    [(torch.optim.AdamW, spoil_a_weight), (torch.optim.Adagrad, overflow), (torch.optim.SGD, load_nan)],
)
def test_a_companion_that_is_not_finite_is_copied_anew(base, lose):
    script = Script("dcl")
    script.optimizer = DCLOptimizer(base(script.model.parameters(), lr=1e-2), script.model, weight=0.7, alpha=0.4)
    data = list(batches(6))
    script.train(data[:3])
    lose(script)
    with pytest.warns(UserWarning, match="it is copied from the model"):
        script.train(data[3:4])
    assert_same(script.optimizer.companion, script.model)
    script.train(data[4:])
    assert script.is_finite()
    assert 0 < script.optimizer.penalty < INF


@pytest.mark.parametrize("distance", ["mse", "kl", "infonce"])
def test_the_step_that_finds_it_is_without_its_penalty(distance):
    """The model is trained as by its base alone."""
    script, plain = Script("dcl", distance=distance), mlp()
    *data, last = batches(3)
    script.train(data)
    theirs = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(script.model.state_dict())
    theirs.load_state_dict(copy.deepcopy(script.optimizer.base.state_dict()))
    script.optimizer.companion[2].bias.data.fill_(NAN)  # no entry of its logits is finite
    with pytest.warns(UserWarning, match="it is copied from the model"):
        script.train([last])
    train(plain, theirs, [last])
    assert_same(script.model, plain)


def test_a_companion_of_the_scripts_own_is_left_to_the_script():
    companion = mlp(seed=1)
    script = Script("dcl", companion=companion)
    spoil_a_weight(script)
    with pytest.warns(UserWarning, match="load weights into optimizer.companion"):
        script.train(batches(1))
    assert script.optimizer.companion is companion
    assert all(bool(p.isfinite().all()) for p in script.model.parameters())


@pytest.mark.gpu
def test_on_a_gpu_it_is_found_once_in_a_hundred_steps():
    script = Script("dcl", torch.float32)
    script.model.cuda()
    data = [(x.cuda(), y.cuda()) for x, y in batches(SYNC_INTERVAL + 1)]
    script.train(data[:65])
    spoil_a_weight(script)
    script.train(data[65:-1])
    assert all(bool(p.isfinite().all()) for p in script.model.parameters())
    with pytest.warns(UserWarning, match="it is copied from the model"):
        script.train(data[-1:])
    assert script.is_finite()


# ---- ranks -----------------------------------------------------------------------------------------------------------


MEETINGS = ["input", "weights"]  # where the first rank's batch, or all companions, are not finite


def worker(rank: int, folder: Path) -> None:
    for where in MEETINGS:
        torch.save(one_rank_meets_it(rank, where), folder / f"{where} {rank}.pt")


def one_rank_meets_it(rank: int, where: str) -> list[Tensor]:
    script = Script("dcl")
    script.model = nn.parallel.DistributedDataParallel(script.model)
    data = list(batches(8))
    script.train(data[rank : rank + 4])
    before = script.forecasts()
    if where == "weights":
        spoil_a_weight(script)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script.step_with_zeros(nan_in_the_input if (where, rank) == ("input", 0) else Script.backward, *data[4])
    if where == "input":  # the other rank's batch was learned from
        assert not torch.equal(script.forecasts()[0], before[0])
    script.train(data[5 + rank : 7 + rank])
    assert script.is_finite()
    return script.forecasts()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("where", MEETINGS)
def test_a_rank_that_meets_it_leaves_the_others_in_step(where, ranks: Path):
    assert_same(*(torch.load(ranks / f"{where} {rank}.pt") for rank in (0, 1)))
