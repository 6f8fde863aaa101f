"""DCP: soft labels are distributions; other targets of the logits' shape are refused before anything changes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from dcl_optim.forecaster import ForwardRecord
from dcl_optim.prototypes.targets import to_classes
from tests.helpers import CLASSES, FEATURES, assert_same, batches, mlp, unreadable_device

ROWS = 16
NAN = float("nan")


def wrap(model: nn.Module, classes: int = CLASSES, **options) -> DCPOptimizer:
    return DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, classes, **options)


def standardised(classes: int) -> torch.Tensor:
    targets = torch.randn(ROWS, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (targets - targets.mean(0)) / targets.std(0)


REFUSED = {
    "binary, one logit": (nn.BCEWithLogitsLoss, (torch.arange(ROWS) % 2)[:, None].double()),
    "multi-label": (nn.BCEWithLogitsLoss, (torch.arange(ROWS * CLASSES) % 3 == 0).double().reshape(ROWS, CLASSES)),
    "one label or none": (nn.BCEWithLogitsLoss, torch.eye(ROWS, CLASSES, dtype=torch.float64)),
    "regression": (nn.MSELoss, standardised(3)),
    "regression, one output": (nn.MSELoss, standardised(1)),
    "log-probabilities": (partial(nn.KLDivLoss, log_target=True, reduction="sum"), F.log_softmax(standardised(4), 1)),
    "not a number": (nn.CrossEntropyLoss, torch.full((ROWS, 2), NAN, dtype=torch.float64)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_are_no_distributions_are_refused_before_anything_changes(case):
    criterion, targets = REFUSED[case][0](), REFUSED[case][1]
    model = nn.Linear(FEATURES, targets.shape[1]).double()
    optimizer = wrap(model, targets.shape[1])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["dcl_optim.DCPOptimizer"]))
    for _ in range(2):  # each time, not the first one only
        optimizer.set_targets(targets)
        loss = criterion(model(torch.randn(ROWS, FEATURES, dtype=torch.float64)), targets)
        with pytest.raises(ValueError, match=r"targets has soft labels that are not distributions.*DCLOptimizer"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert_same((model.state_dict(), optimizer.state_dict()["dcl_optim.DCPOptimizer"]), before)


def one_hot(y: torch.Tensor, classes: int = CLASSES) -> torch.Tensor:
    return F.one_hot(y, classes).double()


def cut_mixed(y: torch.Tensor) -> torch.Tensor:
    share = 1 - 7 * 9 / (28 * 28)  # of an image, as float32 has it
    return share * one_hot(y).float() + (1 - share) * one_hot(y.flip(0)).float()


ACCEPTED = {
    "one-hot": one_hot,
    "mixup": lambda y: 0.7 * one_hot(y) + 0.3 * one_hot(y.flip(0)),
    "CutMix": cut_mixed,
    "label smoothing": lambda y: 0.9 * one_hot(y) + 0.1 / CLASSES,
    "bfloat16": lambda y: cut_mixed(y).bfloat16(),
    "a teacher's probabilities in float16": lambda y: torch.softmax(one_hot(y), 1).half(),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_distributions_are_accepted(kind):
    model = mlp()
    optimizer = wrap(model)
    for x, y in batches(3):
        optimizer.zero_grad()
        optimizer.set_targets(ACCEPTED[kind](y))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.penalty > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 1000, 20_000])
def test_what_rounding_leaves_of_smoothed_labels_is_a_distribution(classes, dtype):
    soft = 0.9 * one_hot(torch.arange(8) % classes, classes) + 0.1 / classes
    soft[:, -1] -= 1e-5  # a rest that was subtracted and rounded
    soft = soft.to(dtype)
    rows, _ = to_classes(soft, ForwardRecord(torch.zeros(8, classes), 1), classes, -100)
    assert rows.data_ptr() == soft.data_ptr()


def test_a_dense_map_of_soft_labels_is_looked_at_along_its_classes():
    soft = torch.softmax(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), 1)
    assert to_classes(soft, ForwardRecord(torch.zeros(2, 3, 4, 4), 1), 3, -100)[0].shape == (32, 3)
    with pytest.raises(ValueError, match="no distribution over the 4 classes"):
        to_classes(soft, ForwardRecord(torch.zeros(2, 3, 4, 4), -1), 4, -100)


def test_a_device_is_looked_at_in_the_first_soft_batch_only():
    """The meta device in place of a GPU: a look is an error."""
    with unreadable_device():
        model = mlp(dtype=torch.float32)
        optimizer = wrap(model, loss_scale=1.0)

        def backward(labels: torch.Tensor) -> None:
            optimizer.zero_grad()
            optimizer.set_targets(labels)
            model(torch.randn(ROWS, FEATURES)).sum().backward()

        soft = torch.eye(CLASSES)[torch.arange(ROWS) % CLASSES]
        backward(torch.arange(ROWS) % CLASSES)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="meta"):
                backward(soft)
        optimizer.forecaster._has_checked_shares = True
        backward(soft)
