"""timm: its models, and the pieces of its training script, around the wrapped optimizer."""

from itertools import product

import numpy as np
import pytest
import timm.data
import timm.loss
import timm.models
import timm.scheduler
import timm.utils
import torch
import torch.nn.functional as F

from dcl_optim import DCPOptimizer
from tests.helpers import assert_same, assert_same_networks, cells, every, fit, seen
from tests.helpers import wrap as wrap_dcl
from tests.integrations.timm_models import CLASSES, MODELS, VIT, adamw, create, images
from tests.reference import CLOSE, EACH, assert_same_training, by_hand, end, term_of, train_by_hand, wrap

WEIGHT = 0.3


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cells(MODELS, VIT, "mobilenetv3_small_050"))  # layer norm, and batch norm
def test_a_model_with_random_depth_trains_as_the_algorithm_written_out(name):
    theirs, model = create(name), create(name)
    optimizer = wrap_dcl(model, adamw(model), weight=WEIGHT)
    torch.manual_seed(5)
    hand = train_by_hand(theirs, adamw, images(3), weight=WEIGHT)
    torch.manual_seed(5)
    fit(optimizer, images(3))
    assert_same(hand, (model, optimizer.companion), atol=1e-8)


# ---- the training loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("smoothing", "dtype"),
    every(3, product([0.0, 0.1], [torch.bfloat16, torch.float32])),
)
def test_timms_training_loop_trains_by_the_line_as_by_the_term(smoothing, dtype):
    """Its scaler, clipping, schedule and average of the weights."""
    criterion = timm.loss.LabelSmoothingCrossEntropy(smoothing)
    trained = []
    for way in ("line", "term"):
        model = create("resnet10t").float()
        optimizer = DCPOptimizer(adamw(model), model, weight=2.0)
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
    start.forecaster.create_state()
    for line, term, before in zip(*(end(optimizer) for optimizer in (*trained, start)), strict=True):
        assert (line - term).norm() < (1e-3 if dtype == torch.float32 else 0.1) * (term - before).norm()
    assert seen(trained[0]).all()


def train_with_mixup(model, optimizer, term):
    """Accumulates two batches, and clips values."""
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    criterion = timm.loss.SoftTargetCrossEntropy()
    np.random.seed(2)  # noqa: NPY002 - timm draws from the global state
    for number, (x, y) in enumerate(images(8, size=6)):
        x, labels = mixup(x, y)
        labels = labels.double()
        z = model(x)
        ((criterion(z, labels) + term(z, labels)) / 2).backward()
        if number % 2 == 1:
            timm.utils.dispatch_clip_grad(model.parameters(), value=1.0)
            optimizer.step()
            optimizer.zero_grad()


@EACH
def test_the_loop_with_mixup_trains_by_the_term_as_with_the_penalty_by_hand(variant):
    trained = []
    for make in (wrap, by_hand):
        model = create()
        optimizer = make(variant, model)
        torch.manual_seed(3)
        train_with_mixup(model, optimizer, term_of(optimizer))
        trained.append(optimizer)
    assert_same_training(*trained, **CLOSE)


# ---- what runs beside the optimizer ----------------------------------------------------------------------------------


def run(model, optimizer, scaler, data):
    for x, y in data:
        optimizer.zero_grad()
        scaler(F.cross_entropy(model(x.float()), y), optimizer)


def test_timms_checkpoints_resume_bit_for_bit(tmp_path):
    model, data = create("mobilenetv3_small_050").float(), list(images(5))
    optimizer, scaler = wrap("dcl", model, adamw(model)), timm.utils.NativeScaler("cpu")
    ema = timm.utils.ModelEmaV3(model, decay=0.9)
    saver = timm.utils.CheckpointSaver(model, optimizer, model_ema=ema, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    torch.manual_seed(5)
    run(model, optimizer, scaler, data[:3])
    saver.save_checkpoint(0, metric=1.0)
    torch.manual_seed(6)
    run(model, optimizer, scaler, data[3:])

    resumed = create("mobilenetv3_small_050", seed=9).float()
    second, its_scaler = wrap("dcl", resumed, adamw(resumed)), timm.utils.NativeScaler("cpu")
    path = str(tmp_path / "last.pth.tar")
    assert timm.models.resume_checkpoint(resumed, path, second, its_scaler, log_info=False) == 1
    torch.manual_seed(6)
    run(resumed, second, its_scaler, data[3:])
    assert_same_networks(optimizer, second)
