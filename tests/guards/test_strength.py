"""The warning of a penalty that is large beside the loss of a guess."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import AutoWeight, DCPOptimizer
from tests.helpers import Logits, all_warnings, sgd
from tests.reference import train

CLASS = torch.tensor([0])


def swing(number, **options):
    """One class whose logits are (1, -1), then (-1, 1), and so on; and the steps in which the warning came."""
    model = Logits()
    optimizer = DCPOptimizer(sgd(model, lr=0.0), model, **options)
    said = []
    for step in range(1, number + 1):
        x = (-1.0) ** step * torch.tensor([[1.0, -1.0]])
        with all_warnings() as caught:
            train(optimizer, [(x, CLASS)], loss=F.cross_entropy)
        said += [step for one in caught if "large beside" in str(one.message)]
    return optimizer, said


@pytest.mark.parametrize("step", [100, 128, 200])
def test_a_penalty_above_half_of_log_k_is_said(step):
    penalty = swing(step, weight=1e-3)[0].logs()["penalty"]
    least = math.log(2) / 2 / penalty
    assert swing(step, weight=lambda now: 1.001 * least * (now == step))[1] == [step]
    assert swing(step, weight=lambda now: 0.999 * least * (now == step))[1] == []


def test_it_is_said_once_and_in_a_step_from_100_on_that_may_read_values():
    assert swing(200, weight=100.0)[1] == [100]
    assert swing(130, weight=lambda step: 100.0 * (step != 100))[1] == [128]


@pytest.mark.parametrize("distance", ["l1", "kl", "infonce"])
def test_other_distances_are_not_compared_with_it(distance):
    assert swing(100, weight=100.0, distance=distance)[1] == []


def test_an_automatic_weight_is_not_warned_of():
    """With few classes it is too small to diverge by, and around a trained model its penalty is large at first."""
    assert swing(100, weight=AutoWeight(floor=100.0))[1] == []


def test_an_error_in_place_of_the_warning_names_the_figures_and_leaves_a_whole_step():
    optimizer, _ = swing(99, weight=3.0)
    message = r"(?s)penalty of DCPOptimizer.*0\.69.*a guess among 2 classes.*smaller weight than 3\."
    with pytest.raises(UserWarning, match=message):
        train(optimizer, [(torch.tensor([[5.0, -5.0]]), CLASS)], loss=F.cross_entropy)
    assert optimizer.logs()["step"] == 100


def train_on_few_rows(optimizer_of, lr, seed=0):
    """Five rows of each of three classes, three a step: the largest loss of the last epoch, and where it was warned."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(3).repeat_interleave(5)
    x = torch.randn(3, 13, generator=generator)[y] + torch.randn(15, 13, generator=generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = optimizer_of(sgd(model, lr=lr), model)
    losses, said = [], []
    for step in range(1, 401):
        rows = torch.randperm(15, generator=generator)[:3]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        with all_warnings() as caught:
            optimizer.step()
        losses.append(loss.item())
        said += [step for one in caught if "large beside" in str(one.message)]
    return max(losses[-20:]), said


def test_training_that_diverges_with_three_classes_is_told_from_training_that_does_not():
    for seed in (1, 2):  # of six, three: a step that may read values must hit a swing
        loss, said = train_on_few_rows(partial(DCPOptimizer, weight=1.0), 0.1, seed)
        assert loss > 0.2
        assert said
    for weight, lr in (("auto", 0.1), (1.0, 0.01)):
        loss, said = train_on_few_rows(partial(DCPOptimizer, weight=weight), lr)
        assert loss < 0.2
        assert not said
