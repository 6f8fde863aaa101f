"""timm's mixup and losses: soft labels, and the factor on the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import timm.data
import timm.loss
import timm.scheduler
import timm.utils
import torch
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from dcl_optim.reference import dcl_step
from tests.helpers import assert_same, cells
from tests.integrations.timm_models import CLASSES, adamw, create, images


def mixed(steps: int, smoothing: float) -> Iterator[tuple[Tensor, Tensor]]:
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=smoothing, num_classes=CLASSES)
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
        criterion(model(x), y).backward()
        optimizer.step()
        assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)
    assert_same(by_hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)


def test_prototypes_take_mixed_labels_that_are_given() -> None:
    model, criterion = create(), timm.loss.SoftTargetCrossEntropy()
    optimizer = DCPOptimizer(adamw(model), model, CLASSES, weight=1.0, alpha=0.6, update="batch", distance="squared")
    data = list(mixed(2, smoothing=0.1))  # smoothed: every class has its share of every row
    expected, logits = torch.zeros(CLASSES, CLASSES, dtype=torch.float64), []
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        optimizer.set_targets(y)
        logits.append(model(x))
        criterion(logits[-1], y).backward()
        penalty = mse(logits[-1].detach(), y @ expected) if step else torch.tensor(0.0)
        assert optimizer.penalty == pytest.approx(float(penalty), abs=1e-12)
        means = (y.T @ logits[-1].detach()) / y.sum(0)[:, None]
        expected = 0.6 * expected + 0.4 * means if step else means
        optimizer.step()
        assert_same(optimizer.prototypes, expected, atol=1e-12)


def test_mixed_labels_are_read_where_they_are_not_given() -> None:
    model, criterion = create(), timm.loss.SoftTargetCrossEntropy()
    optimizer = DCPOptimizer(adamw(model), model, weight=1.0)
    for x, y in mixed(2, smoothing=0.1):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        assert optimizer.logs()["loss_scale"] == pytest.approx(1.0, rel=1e-3)
    assert optimizer.forecaster.seen.any()


@pytest.mark.parametrize(
    ("smoothing", "dtype"),
    cells(product([0.0, 0.1], [torch.float32, torch.bfloat16]), (0.0, torch.bfloat16), (0.1, torch.float32)),
)
def test_timms_training_loop_trains_by_labels_that_are_read_as_by_given_ones(
    smoothing: float, dtype: torch.dtype
) -> None:
    """Its scaler, clipping, schedule and average of the weights."""
    criterion = timm.loss.LabelSmoothingCrossEntropy(smoothing)
    trained: list[tuple[nn.Module, DCPOptimizer]] = []
    for given in (False, True):
        model = create("resnet10t").float()
        optimizer = DCPOptimizer(adamw(model), model, CLASSES if given else None, weight=2.0)
        scaler = timm.utils.NativeScaler("cpu")
        schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=8, warmup_t=2, t_in_epochs=False)
        ema = timm.utils.ModelEmaV3(model, decay=0.9)
        torch.manual_seed(5)
        for update, (x, y) in enumerate(images(6, size=16), start=1):
            if given:
                optimizer.set_targets(y)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = criterion(model(x.float()), y)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            optimizer.zero_grad()
            ema.update(model, step=update)
            schedule.step_update(num_updates=update)
        trained.append((model, optimizer))
    (model, optimizer), (expected, second) = trained
    assert_same(model, expected)
    assert_same(optimizer.state_dict(), second.state_dict())
    assert optimizer.forecaster.seen.all()
    assert optimizer.penalty > 0


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "smoothed": lambda: timm.loss.LabelSmoothingCrossEntropy(0.1),
    "binary": timm.loss.BinaryCrossEntropy,
    "soft": timm.loss.SoftTargetCrossEntropy,
}


def test_the_factor_on_timms_smoothed_loss_is_read_off_the_gradient() -> None:
    model, criterion = create(), LOSSES["smoothed"]()
    optimizer = DCLOptimizer(adamw(model), model, weight=1.0)
    for x, y in images(2):
        (criterion(model(x), y) / 4).backward()
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.25)


def test_a_binary_loss_hides_its_factor_and_the_second_part_of_a_batch_warns() -> None:
    model, criterion = create(), LOSSES["binary"]()
    optimizer = DCLOptimizer(adamw(model), model, weight=1.0)
    (x, y), (more, labels) = images(2)
    (criterion(model(x), y) / 2).backward()
    assert optimizer.logs()["loss_scale"] == 1.0
    loss = criterion(model(more), labels) / 2
    with pytest.warns(UserWarning, match="pass .*loss_scale="):
        loss.backward()
