"""timm's mixup and losses: soft labels, and the factor on the loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import timm.data
import timm.loss
import timm.scheduler
import timm.utils
import torch
from torch import Tensor

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from dcl_optim.reference import dcl_step
from tests.by_hand import EACH, assert_same_training, by_hand, end, wrap
from tests.helpers import assert_same, cells
from tests.integrations.timm_models import CLASSES, adamw, create, images


def mixed(steps: int, smoothing: float) -> Iterator[tuple[Tensor, Tensor]]:
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=smoothing, num_classes=CLASSES)
    np.random.seed(2)  # noqa: NPY002 - timm draws from the global state
    torch.manual_seed(2)
    for x, y in images(steps):
        soft_x, soft_y = mixup(x, y)
        yield soft_x, soft_y.double()


def test_mixup_with_soft_targets_trains_as_the_algorithm_written_out() -> None:
    by_hand, model = create(), create()
    companion, criterion = copy.deepcopy(by_hand), timm.loss.SoftTargetCrossEntropy()
    base, second = adamw(by_hand), adamw(companion)
    optimizer = DCLOptimizer(adamw(model), model, weight=0.3)
    data = list(mixed(3, smoothing=0.1))
    torch.manual_seed(5)
    for x, y in data:
        dcl_step(by_hand, companion, base, second, x, y, timm.loss.SoftTargetCrossEntropy(), mse, weight=0.3)
    torch.manual_seed(5)
    for x, y in data:
        optimizer.zero_grad()
        z = model(x)
        (criterion(z, y) + optimizer.penalty(z)).backward()
        optimizer.step()
        assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)
    assert_same(by_hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)


def test_prototypes_of_mixed_labels_are_as_written_out() -> None:
    """The term takes the shares as they are, with their smoothing."""
    criterion = timm.loss.SoftTargetCrossEntropy()
    runs = []
    for make in (wrap, by_hand):
        model = create()
        optimizer = make("dcp", model, adamw(model))
        torch.manual_seed(5)
        for x, y in list(mixed(4, smoothing=0.1)):
            optimizer.zero_grad()
            z = model(x)
            (criterion(z, y) + optimizer.penalty(z, y)).backward()
            optimizer.step()
        runs.append(optimizer)
    assert_same_training(*runs, rtol=1e-6, atol=1e-6)
    assert runs[0].logs()["loss_scale"] == pytest.approx(1.0, rel=1e-6)


@EACH
def test_mixup_of_some_batches_is_skipped_by_the_line_with_one_warning(variant: str) -> None:
    """The first of these batches reads the same backward, so that mixing leaves its labels plain."""
    criterion, data = timm.loss.SoftTargetCrossEntropy(), list(mixed(3, smoothing=0.1))
    assert [int((y[0] > 0.05).sum()) for _, y in data] == [1, 2, 2]
    model = create()
    optimizer = wrap(variant, model, adamw(model))
    skipped = []

    def train() -> None:
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            skipped.append(optimizer.logs()["skipped"])

    with pytest.warns(UserWarning, match=r"(?s)a batch gets no penalty.*factors") as said:
        train()
    assert skipped == [0, 1, 2]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("smoothing", "dtype"),
    cells(product([0.0, 0.1], [torch.float32, torch.bfloat16]), (0.0, torch.bfloat16), (0.1, torch.float32)),
)
def test_timms_training_loop_trains_by_the_line_as_by_the_term(smoothing: float, dtype: torch.dtype) -> None:
    """Its scaler, clipping, schedule and average of the weights."""
    criterion = timm.loss.LabelSmoothingCrossEntropy(smoothing)
    trained: list[DCPOptimizer] = []
    for way in ("line", "term"):
        model = create("resnet10t").float()
        optimizer: Any = DCPOptimizer(adamw(model), model, weight=2.0)
        scaler = timm.utils.NativeScaler("cpu")
        schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=8, warmup_t=2, t_in_epochs=False)
        ema = timm.utils.ModelEmaV3(model, decay=0.9)
        torch.manual_seed(5)
        for update, (x, y) in enumerate(images(6, size=16), start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                z = model(x.float())
                loss = criterion(z, y) + (optimizer.penalty(z, y) if way == "term" else 0.0)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            optimizer.zero_grad()
            ema.update(model, step=update)
            schedule.step_update(num_updates=update)
        trained.append(optimizer)
    model = create("resnet10t").float()
    start = DCPOptimizer(adamw(model), model, num_classes=CLASSES)
    for line, term, before in zip(*(end(optimizer) for optimizer in (*trained, start)), strict=True):
        assert (line - term).norm() < (1e-3 if dtype == torch.float32 else 0.1) * (term - before).norm()
    assert trained[0].forecaster.seen.all()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_binary_loss_is_refused_by_the_line_and_trains_by_the_term(parts: int) -> None:
    criterion, data = timm.loss.BinaryCrossEntropy(), list(images(4))
    model, by_hand = create(drop_path_rate=0.0, patch_drop_rate=0.0), create(drop_path_rate=0.0, patch_drop_rate=0.0)
    companion, base = copy.deepcopy(by_hand), adamw(by_hand)
    second = adamw(companion)
    optimizer = DCLOptimizer(adamw(model), model, weight=0.3)
    for start in range(0, len(data), parts):
        for x, y in data[start : start + parts]:
            z = model(x)
            ((criterion(z, y) + optimizer.penalty(z)) / parts).backward()
            z, c = by_hand(x), companion(x)
            ((criterion(z, y) + 0.3 * mse(z, c.detach()).mean()) / parts).backward()
            (mse(c, 0.6 * c.detach() + 0.4 * z.detach()).mean() / parts).backward()
        for each in (optimizer, base, second):
            each.step()
            each.zero_grad()
    assert_same(by_hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)
    model = create()
    dcl = DCLOptimizer(adamw(model), model, weight=1.0)
    with pytest.raises(RuntimeError, match=r"loss \+ optimizer\.penalty\(logits\)"):
        criterion(model(data[0][0]), data[0][1]).backward()
    dcl.detach()
    dcp = DCPOptimizer(adamw(model), model)
    with pytest.raises(RuntimeError, match=r"loss \+ optimizer\.penalty\(logits, labels\)"):
        criterion(model(data[0][0]), data[0][1]).backward()
    assert not dcp.forecaster.seen.any()
